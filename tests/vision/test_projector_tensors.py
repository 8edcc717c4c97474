"""Projectors whose families' pictures need further libraries: their tensors are those of transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from twofold.vision.mmproj import projector_checkpoint

from tests.tiny_models.gguf import gguf_bytes, gguf_parts
from tests.tiny_models.mmproj import write_projector, write_text_header
from tests.tiny_models.writing import write_tiny_tokenizer

TEXT: Final = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 280, "pad_token_id": 0,
}  # fmt: skip
TOWER: Final = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


@dataclass(frozen=True)
class Case:
    """A tiny model, and what its projector file says of it."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tokens: tuple[str, ...]
    scale: int
    """Patches along a side of a row of the text."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    rounded: str = ""
    """Part of the name of a tensor that files hold with another rounding."""


CASES: Final = {
    "gemma3": Case(
        {}, {"image_size": 32, "patch_size": 4},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), 2, {"mm_tokens_per_image": 16}, "soft_emb_norm",
    ),
    "llama4": Case(
        {"intermediate_size_mlp": 48, "num_local_experts": 4},
        {
            "image_size": 16, "patch_size": 4, "vision_output_dim": 24, "projector_input_dim": 40,
            "projector_output_dim": 24, "intermediate_size": 128,
        },
        ("<|image_start|>", "<|image_end|>", "<|patch|>"), 2,
    ),
    "kimi_k25": Case(
        {
            "model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
        },
        {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 6},
        ("<|media_begin|>", "<|media_end|>", "<|media_pad|>"), 2,
        {"projection_hidden_size": 32, "tie_word_embeddings": False},
    ),
}  # fmt: skip


def written(folder: Path, name: str, case: Case) -> Any:
    """Write the model and its tokenizer; returns transformers' model."""
    config = transformers.AutoConfig.for_model(
        name, text_config=TEXT | case.text, vision_config=TOWER | case.vision, **case.outer
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(case.tokens)})
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case, folder, out = CASES[name], tmp_path / "model", tmp_path / "out"
    model = written(folder, name, case)
    out.mkdir()
    sizes = {"projector.scale_factor": case.scale}
    projector = write_projector(tmp_path / "mmproj.gguf", folder, name, **sizes)
    found = projector_checkpoint(projector, write_text_header(tmp_path / "text.gguf", folder, name), out)
    expected = {
        each.removeprefix("model."): values
        for each, values in model.state_dict().items()
        if "language_model" not in each and "lm_head" not in each and ".head." not in each
    }
    assert found.keys() == expected.keys()
    for each, values in found.items():
        tolerance = 1e-6 if case.rounded and case.rounded in each else 0.0
        np.testing.assert_allclose(values, expected[each], rtol=0, atol=tolerance, err_msg=each)
    kept = transformers.AutoConfig.from_pretrained(out)
    known = model.config.vision_config.to_dict()
    differing = {key for key, value in kept.vision_config.to_dict().items() if value != known.get(key)}
    assert differing <= {"dtype", "vision_use_head", "_name_or_path", "image_size"}


def test_products_that_old_converters_named_the_other_way_round(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder, "gemma3", CASES["gemma3"])
    text = write_text_header(tmp_path / "text.gguf", folder, "gemma3")
    new = write_projector(tmp_path / "mmproj-new.gguf", folder, "gemma3", **{"projector.scale_factor": 2})
    fields, tensors, data = gguf_parts(new)
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    renamed = [
        (".".join(other.get(part, part) for part in name.split(".")), *rest) for name, *rest in tensors
    ]
    old = tmp_path / "mmproj-old.gguf"
    old.write_bytes(gguf_bytes(fields, renamed, data))  # type: ignore[arg-type]
    expected, found = (projector_checkpoint(each, text, tmp_path) for each in (new, old))
    assert all(torch.equal(found[name], values) for name, values in expected.items())
