"""Writes an adapter as PEFT saves it; `peft_files` and `routed_experts` read it and say what its tensors are.

Routed experts are stacks, as PEFT's `target_parameters` of transformers 5's models. All products get one rank, filled
up with zeros, and scales are factors of B, so alpha is the rank and there are no patterns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from twofold.adapters.adapter import F32, Adapter, LowRank
from twofold.adapters.base_shapes import GATE_UP, BaseExperts, BaseShapes
from twofold.adapters.peft_config import CONFIG_FILE
from twofold.adapters.peft_files import MODEL_FILE
from twofold.adapters.writing import by_layer, fused, stacked
from twofold.api.errors import ConfigError

_PREFIX: Final = "base_model.model."
_VERSION: Final = "0.21.0"
"""Version of PEFT whose layout is written."""
_EMBEDDING: Final = "model.embed_tokens"


def write_peft(adapter: Adapter, base: BaseShapes, directory: Path, *, base_path: str) -> None:
    """Write settings and weights into `directory`, which is empty. base_path: of the model, for readers.

    Raises ConfigError for experts whose stacks PEFT would not read alike.
    """
    single, routed = by_layer(adapter, base)
    stacks = {layer: _stacks(parts, base.experts[layer]) for layer, parts in routed.items()}
    ranks = [each.rank for each in single.values()]
    ranks += [
        each.rank for parts in stacks.values() for part in parts.values() for each in part if each is not None
    ]
    rank = max(ranks, default=1)
    tensors: dict[str, F32] = {}
    for key, product in single.items():
        _add_matrix(tensors, key, product, base.matrices[key], rank)
    parameters: set[str] = set()
    for layer, parts in stacks.items():
        parameters |= {f"experts.{part}" for part in parts}
        _add_stacks(tensors, layer, parts, base.experts[layer], rank)
    for key, whole in adapter.replaced.items():
        # PEFT stores the matrix below a product, too, where a program has resized the vocabulary.
        tensors[f"{_PREFIX}{key}{'.base_layer' if key in single else ''}.weight"] = whole
    settings = {
        "peft_type": "LORA",
        "peft_version": _VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(single) or [],
        "target_parameters": sorted(parameters, reverse=True) or None,  # gate_up_proj first
        "modules_to_save": sorted(key.rpartition(".")[2] for key in adapter.replaced.keys() - single.keys())
        or None,
        "inference_mode": True,
    }
    save_file(tensors, directory / MODEL_FILE, {"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _stacks(
    parts: Mapping[str, list[LowRank | None]], experts: BaseExperts
) -> dict[str, list[LowRank | None]]:
    """Products by the parameters of transformers' fused stacks."""
    found = {}
    if "gate_proj" in parts or "up_proj" in parts:
        found[GATE_UP] = fused(parts, experts)
    if "down_proj" in parts:
        found["down_proj"] = list(parts["down_proj"])
    return found


def _add_matrix(
    tensors: dict[str, F32], key: str, product: LowRank, shape: tuple[int, int], rank: int
) -> None:
    (a,), (b,) = stacked([product], shape, rank)
    if key == _EMBEDDING:  # the change of the embedding is the transpose of B A
        tensors[f"{_PREFIX}{key}.lora_embedding_A"] = np.ascontiguousarray(b.T)
        tensors[f"{_PREFIX}{key}.lora_embedding_B"] = np.ascontiguousarray(a.T)
        return
    tensors[f"{_PREFIX}{key}.lora_A.weight"], tensors[f"{_PREFIX}{key}.lora_B.weight"] = a, b


def _add_stacks(
    tensors: dict[str, F32],
    layer: str,
    parts: Mapping[str, list[LowRank | None]],
    experts: BaseExperts,
    rank: int,
) -> None:
    """Stacks of one layer: of two, the first is below `base_layer`."""
    for number, (part, products) in enumerate(parts.items()):
        a, b = stacked(products, experts.shape(part), rank)
        if experts.transposed and not experts.interleaved:
            raise ConfigError(
                f"{layer}: PEFT takes this model's inputs of experts for outputs, so its form is ambiguous; write gguf"
            )
        nested = ".base_layer" if len(parts) > 1 and number == 0 else ""
        name = f"{_PREFIX}{layer}{nested}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, a.shape[-1]))
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b.transpose(1, 2, 0).reshape(b.shape[1], -1))
