"""Tiny random models of transformers with adapters that the installed PEFT makes, and their merged weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from twofold.adapters.adapter import Adapter
from twofold.adapters.base_shapes import BaseExperts, BaseShapes

F32 = npt.NDArray[np.float32]

_SIZES: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
_EXPERTS: Final = {
    "qwen3_moe": {"num_experts": 5},
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 5, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 5, "intermediate_size": 24},
    "llama4_text": {"num_local_experts": 5, "intermediate_size": 24, "intermediate_size_mlp": 40},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Settings of each model type beside _SIZES."""
TYPES: Final = tuple(_EXPERTS)


@dataclass(frozen=True)
class Trained:
    """A base model, and the same after PEFT has merged an adapter into it."""

    base: BaseShapes
    before: Mapping[str, F32]
    """Weights by transformers' names."""
    after: Mapping[str, F32]
    model_type: str


@dataclass(frozen=True)
class Recipe:
    """What to train: a model type, further settings of it, and those of the adapter."""

    model_type: str
    adapter: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)


def model_of(recipe: Recipe) -> Any:
    """A random model of transformers, always the same for the same recipe."""
    import torch
    import transformers

    torch.manual_seed(7)
    settings = {**_SIZES, **_EXPERTS[recipe.model_type], **recipe.model}
    config = transformers.AutoConfig.for_model(recipe.model_type, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def train(recipe: Recipe, directory: Path) -> Trained:
    """Save an adapter with random factors to `directory`, and merge it."""
    import peft
    import torch

    model = model_of(recipe)
    base = base_shapes(model, recipe.model_type)
    before = _weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**recipe.adapter))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
                elif "modules_to_save" in name:
                    parameter.add_(torch.randn_like(parameter))
        adapted.save_pretrained(directory)
        merged = adapted.merge_and_unload()
    return Trained(base, before, _weights(merged), recipe.model_type)


def merge(recipe: Recipe, directory: Path) -> Trained:
    """A base model, and the same after PEFT has loaded and merged the adapter in `directory`."""
    import peft

    model = model_of(recipe)
    base, before = base_shapes(model, recipe.model_type), _weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = peft.PeftModel.from_pretrained(model, directory).merge_and_unload()
    return Trained(base, before, _weights(merged), recipe.model_type)


def _weights(model: Any) -> dict[str, F32]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def base_shapes(model: Any, model_type: str) -> BaseShapes:
    """Facts about a model of transformers, by the names of its published checkpoint."""
    matrices: dict[str, tuple[int, int]] = {}
    experts: dict[str, BaseExperts] = {}
    for theirs, value in model.state_dict().items():
        name = published(theirs, model_type)
        if theirs.endswith("experts.gate_up_proj"):
            interleaved, transposed = model_type == "gpt_oss", model_type in ("gpt_oss", "llama4_text")
            count, first, second = value.shape
            both, hidden = (second, first) if transposed else (first, second)
            facts = BaseExperts(count, hidden, both // 2, interleaved=interleaved, transposed=transposed)
            experts[name.removesuffix(".gate_up_proj")] = facts
        elif value.ndim == 2 and theirs.endswith(".weight"):
            matrices[name.removesuffix(".weight")] = (value.shape[0], value.shape[1])
    return BaseShapes(matrices, experts)


def published(name: str, model_type: str) -> str:
    """Name in the published checkpoint of a tensor of transformers' model."""
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name


def with_adapter(trained: Trained, adapter: Adapter) -> dict[str, F32]:
    """The base's weights with an adapter's changes, by transformers' names."""
    result = {}
    for theirs, values in trained.before.items():
        name = published(theirs, trained.model_type).removesuffix(".weight")
        weights = adapter.replaced.get(name, values).copy()
        if name in adapter.products:
            weights += adapter.products[name].b @ adapter.products[name].a
        module, _, part = name.rpartition(".")
        if module in trained.base.experts and part in ("gate_up_proj", "down_proj"):
            facts = trained.base.experts[module]
            for number in range(facts.num_experts):
                expert = weights[number].T if facts.transposed else weights[number]
                _change(expert, adapter, f"{module}.{number}", part, facts)
        result[theirs] = weights
    return result


def _change(weights: F32, adapter: Adapter, expert: str, part: str, facts: BaseExperts) -> None:
    """Change one expert's rows, a view, in place."""
    middle = facts.intermediate_size
    gate, up = (
        (slice(0, None, 2), slice(1, None, 2)) if facts.interleaved else (slice(middle), slice(middle, None))
    )
    rows = {"gate_proj": gate, "up_proj": up} if part == "gate_up_proj" else {part: slice(None)}
    for each, stretch in rows.items():
        product = adapter.products.get(f"{expert}.{each}")
        if product is not None:
            weights[stretch] += product.b @ product.a
