"""Adapters that are refused, each in one line: file, tensor or key, what was given and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from twofold.adapters.base_shapes import BaseShapes
from twofold.adapters.reading import read_adapter
from twofold.api.errors import ModelLoadError

from tests.adapters.adapter_files import (
    COUNT,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYER,
    PREFIX,
    TOKENS,
    Tensors,
    base,
    factors,
    numbers,
    write,
)

Q = f"{LAYER}.self_attn.q_proj"
Edit = Callable[[Tensors], object]


def refusal(directory: Path, model: BaseShapes | None = None, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        read_adapter(directory, model or base(), **options)
    message = str(error.value)
    assert message.isprintable()
    assert message.startswith(str(directory))
    return message


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> Tensors:
    return {f"{PREFIX}{module}.lora_A.weight": numbers(*a), f"{PREFIX}{module}.lora_B.weight": numbers(*b)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected LORA"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"use_dora": True}, "use_dora is True, expected none"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only', expected 'none'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is [1, 2]"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"r": 0}, "r is 0, expected an integer from 1"),
        ({"r": None}, "r is missing"),
        ({"lora_alpha": "4"}, "lora_alpha is '4'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"alpha_pattern": {"q_proj": None}}, "q_proj is missing"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "(a+)+b is 1, expected a pattern of at most"),
        ({"alpha_pattern": {"(q_proj": 1}}, "(q_proj is 1, expected a regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0"),
        ({"rank_pattern": {"q_proj": 3}}, "has rank 2, expected 3 from the adapter"),
        ({"r": 3}, "has rank 2, expected 3 from the adapter"),
        ({"lora_B_layout": "other"}, "lora_B_layout is 'other'"),
        ({"lora_alpha": 1e38}, "exceeds float32"),
    ],
)
def test_settings(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    assert words in refusal(write(tmp_path, factors(Q, 8, HIDDEN), **settings))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{PREFIX}{Q}.lora_A.weight"), "q_proj.lora_B.weight: has no partner: factor A"),
        (lambda t: t.pop(f"{PREFIX}{Q}.lora_B.weight"), "q_proj.lora_A.weight: has no partner: factor B"),
        (lambda t: t.update(pair(Q, (2, HIDDEN), (8, 3))), "has rank 2, but"),
        (lambda t: t.update(pair(Q, (0, HIDDEN), (8, 0))), "has rank 0, expected 1 to 512"),
        (lambda t: t.update(pair(Q, (2, 8), (HIDDEN, 2))), "[6, 8], but the model has [8, 6]; the adapter was trained"),
        (lambda t: t.update(pair(Q, (2, HIDDEN, 1), (8, 2))), "has shape [2, 6, 1], expected two dimensions"),
        (lambda t: t.update(pair(f"{LAYER}.mlp.x_proj", (2, HIDDEN), (8, 2))), "no matrix model.layers.0.mlp.x_proj"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_A.other.weight": numbers(2, HIDDEN)}), "is also there as"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_magnitude_vector": numbers(8)}), "is of DoRA, which is not computed"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_B.bias": numbers(8)}), "is of a bias"),
        (lambda t: t.update({f"{PREFIX}{Q}.weight": numbers(8, HIDDEN)}), "is unknown; expected factors A and B"),
        (lambda t: t.update({f"{PREFIX}score.weight": numbers(8, HIDDEN)}), "the model has no matrix score"),
        (lambda t: t.update({f"{PREFIX}other": numbers(8)}), "other: is unknown"),
        (lambda t: t.update({f"{PREFIX}lm_head.weight": numbers(TOKENS + 1, HIDDEN)}), "with shape [11, 6], expected"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_A.weight": np.full((2, HIDDEN), np.nan, np.float32)}), "holds a NaN"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_B.weight": np.full((8, 2), np.inf, np.float32)}), "an infinity"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_A.weight": np.ones((2, HIDDEN), np.int8)}), "is I8, expected one of"),
        (lambda t: t.update({f"{PREFIX}{'a' * 500}.lora_A.weight": numbers(2, 2)}), "expected at most 400"),
        (lambda t: t.update({name.replace("model.layers", "layers"): v for name, v in t.items()}), "changes too"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)  # fmt: skip
def test_tensors(tmp_path: Path, edit: Edit, words: str) -> None:
    tensors = factors(Q, 8, HIDDEN)
    edit(tensors)
    assert words in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (pair(f"{EXPERTS}.3.up_proj", (2, HIDDEN), (INNER, 2)), "is of expert 3, expected 0 to 2"),
        (pair(f"{EXPERTS}.1.x_proj", (2, HIDDEN), (INNER, 2)), "a part 'x_proj', expected one of gate_proj"),
        (pair(f"{EXPERTS}.1.up_proj", (2, INNER), (HIDDEN, 2)), "[6, 4], but the model has [4, 6]"),
        (pair(f"{EXPERTS}.1.up_proj", (3, HIDDEN), (INNER, 3)), "has rank 3, expected 2"),
        (pair("model.layers.1.mlp.experts.1.up_proj", (2, HIDDEN), (INNER, 2)), "no routed experts model.layers.1"),
        (pair(f"{EXPERTS}.up_proj", (2, 2, HIDDEN), (COUNT, INNER, 2)), "has shape [2, 2, 6], expected [3 or 1"),
        (pair(f"{EXPERTS}.up_proj", (6, HIDDEN), (INNER, 6)), "has shape [6, 6], expected [3 or 1"),
        (pair(EXPERTS, (5, HIDDEN), (2 * INNER, 5)), "has 5 ranks of experts, expected a multiple of 3"),
        (pair(EXPERTS, (6, HIDDEN), (5, 6)), "[5, 6], expected [8, 6] (gate_up_proj) or [6, 4] (down_proj)"),
        (pair(EXPERTS, (2, 3, HIDDEN), (2 * INNER, 6)), "has shape [2, 3, 6], expected two dimensions"),
        (
            pair(f"{EXPERTS}.up_proj", (1, 2, HIDDEN), (COUNT, INNER, 2))
            | pair(f"{EXPERTS}.1.up_proj", (2, HIDDEN), (INNER, 2)),
            "is also there one by one",
        ),
        (
            pair(EXPERTS, (6, HIDDEN), (2 * INNER, 6)) | pair(f"{EXPERTS}.base_layer", (6, HIDDEN), (INNER, 6)),
            "base_layer.lora_A.weight: has `in` and `out` exchanged, other tensors have not",
        ),
        (
            pair(EXPERTS, (6, HIDDEN), (2 * INNER, 6)) | pair(f"{EXPERTS}.base_layer", (6, HIDDEN), (2 * INNER, 6)),
            "changes model.layers.0.mlp.experts.0.gate_proj, which another tensor",
        ),
    ],
)  # fmt: skip
def test_routed_experts(tmp_path: Path, tensors: Tensors, words: str) -> None:
    assert words in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("version", "transposed"), [(None, False), ("0.19.0.dev0", False), ("0.19.0", True), ("0.21.2", True)]
)
def test_square_pairs_alone_without_a_version_that_decides(
    tmp_path: Path, version: str | None, transposed: bool
) -> None:
    model = base(inner=HIDDEN, transposed=transposed)
    tensors = pair(EXPERTS, (6, HIDDEN), (HIDDEN, 6))
    message = refusal(write(tmp_path, tensors, peft_version=version), model)
    assert "is square, and peft_version" in message


def test_columns_of_unsloth_without_a_mark(tmp_path: Path) -> None:
    tensors = pair(EXPERTS, (6, HIDDEN), (2 * INNER, 6))
    message = refusal(write(tmp_path, tensors, auto_mapping={"unsloth_fixed": True}))
    assert "set it to rank_major, or to grouped_by_expert" in message


@pytest.mark.parametrize("module", [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.1.gate_up_proj"])
def test_fused_rows_of_unknown_order(tmp_path: Path, module: str) -> None:
    stack = () if module.endswith("1.gate_up_proj") else (COUNT,)
    tensors = pair(module, (*stack, 2, HIDDEN), (*stack, 2 * INNER, 2))
    assert "whether rows of gate and up alternate" in refusal(
        write(tmp_path, tensors), base(interleaved=True)
    )


def test_rank_above_the_limit(tmp_path: Path) -> None:
    assert "has rank 2, expected 1 to 1" in refusal(write(tmp_path, factors(Q, 8, HIDDEN)), max_rank=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_model.bin", "holds adapter_model.bin, a pickle"),
        ("adapter_model-00001-of-00002.safetensors", "a part of an adapter"),
        ("readme", "holds no adapter_model.safetensors"),
    ],
)
def test_weights_in_other_files(tmp_path: Path, name: str, words: str) -> None:
    write(tmp_path, factors(Q, 8, HIDDEN))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / name)
    assert words in refusal(tmp_path)


def test_missing_settings(tmp_path: Path) -> None:
    write(tmp_path, factors(Q, 8, HIDDEN))
    (tmp_path / "adapter_config.json").unlink()
    assert "adapter_config.json: missing (settings of a LoRA adapter)" in refusal(tmp_path)


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    save_file(factors(Q, 8, HIDDEN), tmp_path / "style.safetensors")
    assert "expected a directory with adapter_config.json, or a GGUF file" in refusal(
        tmp_path / "style.safetensors"
    )
    assert "expected a directory with adapter_config.json, or a GGUF file" in refusal(tmp_path / "missing")
