"""GGUF files that say less than others do, or say it in another way, against the same weights in Hugging Face's layout.

Families whose random configurations all fit a GGUF file are compared in tests/models/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ModelLoadError
from twofold.models.registry import read_config

from tests.engine.model_runs import load, random_prompt
from tests.models.family_gguf_files import DEEPSEEK, FLASH
from tests.models.transformers_runs import write_gguf
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, FULL, SLIDING
from tests.tiny_models.writing import TinyModel, write_tiny_model

LAGUNA = EXAMPLES["laguna"].changed(moe_router_logit_softcapping=0.0)
GRANITE = EXAMPLES["granitemoe_swa"].changed(layer_rope_theta=[0, 1e4, 1e4, 1e4])
MISTRAL4 = EXAMPLES["mistral4"].changed(
    rope_parameters=EXAMPLES["mistral4"].settings["rope_parameters"] | {"mscale": 0.5}
)
PERIOD_OF_THREE = {"layer_types": [FULL, SLIDING, SLIDING]}
Edit = Callable[[Any], None]


def logits(path: Path) -> Any:
    model = load(path)
    rows = model.model.config.vocab_size
    return model.logits(model.prefill([token % rows for token in random_prompt(40)])[1])


def without(*keys: str) -> Edit:
    def edit(writer: Any) -> None:
        for key in list(writer.kv_data[0]):
            if key.partition(".")[2] in keys:
                del writer.kv_data[0][key]

    return edit


def with_period(period: int) -> Edit:
    def edit(writer: Any) -> None:
        key = next(key for key in writer.kv_data[0] if key.endswith("sliding_window_pattern"))
        del writer.kv_data[0][key]
        writer.add_uint32(key, period)

    return edit


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        (LAGUNA, None),
        (LAGUNA.changed(gating="per-element"), None),
        (LAGUNA.changed(**PERIOD_OF_THREE), with_period(3)),
        (LAGUNA.changed(**PERIOD_OF_THREE), without("attention.sliding_window_pattern")),
        (GRANITE, None),
        (MISTRAL4, None),
        (EXAMPLES["mellum"].changed(layer_types=[SLIDING, SLIDING, FULL]), with_period(3)),
        (EXAMPLES["mellum"].changed(layer_types=[SLIDING] * 3), without("attention.sliding_window_pattern")),
        (EXAMPLES["mimo_v2_flash"].changed(attention_value_scale=1.0), None),
        (EXAMPLES["dots1"], without("expert_count", "expert_feed_forward_length", "feed_forward_length")),
        (EXAMPLES["hy_v3"], without("expert_count", "expert_feed_forward_length", "expert_shared_count")),
        (EXAMPLES["afmoe"], without("expert_shared_count", "expert_gating_func")),
    ],
    ids=lambda value: getattr(value, "gguf", None),
)  # fmt: skip
def test_equals_the_layout_of_hugging_face(tmp_path: Path, model: Any, edit: Edit | None) -> None:
    expected = logits(write_tiny_model(tmp_path / "hf", model))
    np.testing.assert_array_equal(logits(write_gguf(tmp_path / "model.gguf", model, edit=edit)), expected)


@pytest.mark.parametrize("name", ["flash", *DEEPSEEK])
def test_a_missing_score_follows_from_the_routers_bias(tmp_path: Path, name: str) -> None:
    """GLM-4.7-Flash's first files lack it; only sigmoids have a bias, DeepSeek-V2's softmax has none."""
    model: TinyModel = FLASH if name == "flash" else DEEPSEEK[name]
    expected = logits(write_tiny_gguf(tmp_path / "whole.gguf", model))
    early = write_tiny_gguf(tmp_path / "early.gguf", model, edit=without("expert_gating_func"))
    np.testing.assert_array_equal(logits(early), expected)


def test_a_routers_bias_without_its_suffix(tmp_path: Path) -> None:
    model = EXAMPLES["hy_v3"]
    expected = logits(write_gguf(tmp_path / "whole.gguf", model))

    def edit(writer: Any) -> None:
        add = writer.add_tensor
        writer.add_tensor = lambda name, *rest, **more: add(
            name.replace("exp_probs_b.bias", "exp_probs_b"), *rest, **more
        )

    np.testing.assert_array_equal(logits(write_gguf(tmp_path / "bare.gguf", model, edit=edit)), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_head_in_the_file_is_read_despite_a_default_tie(tmp_path: Path, name: str) -> None:
    untied, tied = (
        replace(EXAMPLES[name], tie_word_embeddings=tie).changed(tie_word_embeddings=tie)
        for tie in (False, True)
    )
    own = logits(write_gguf(tmp_path / "own.gguf", untied))
    np.testing.assert_array_equal(own, logits(write_tiny_model(tmp_path / "hf", untied)))
    assert np.abs(own - logits(write_gguf(tmp_path / "tied.gguf", tied))).max() > 0.1


def test_granite_with_windows_and_without_experts_names_the_reason(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", GRANITE, edit=lambda writer: None)
    read_config(path)

    def dense(writer: Any) -> None:
        add = writer.add_tensor
        writer.add_tensor = lambda name, *rest, **more: (
            None if "exps" in name or "gate_inp" in name else add(name, *rest, **more)
        )
        without("expert_count")(writer)

    with pytest.raises(ModelLoadError, match="has no experts, expected granite_swa with experts"):
        read_config(write_gguf(tmp_path / "dense.gguf", GRANITE, edit=dense))
