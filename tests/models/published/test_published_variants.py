"""Checkpoints as their authors publish them and as transformers saves them, where that differs from the examples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from twofold.models.model_files import open_model_files

from tests.engine.model_runs import load
from tests.models.published.config_sweep import MODELS
from tests.models.transformers_runs import (
    PROMPT,
    one_torch_thread,
    reference_logits,
    reference_of,
    write_gguf,
)
from tests.tiny_models.table import SLIDING, YARN
from tests.tiny_models.writing import TinyModel, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

HUNYUAN: dict[str, Any] = {
    "moe_topk": [4, 4, 4], "num_experts_per_tok": [4, 4, 4], "n_group": False, "topk_group": False,
    "routed_scaling_factor": False, "num_shared_expert": [1, 1, 1], "moe_intermediate_size": [64, 64, 64],
}  # fmt: skip
MIMO: dict[str, Any] = {
    "sliding_window_size": 5, "moe_layer_freq": [0, 1, 1], "hybrid_layer_pattern": [0, 1, 1],
    "attention_value_scale": None, "n_shared_experts": None,
}  # fmt: skip
STEP = MODELS["step3p7"]
WINDOWS_ALONE = STEP.changed(
    layer_types=[SLIDING] * 3,
    rope_parameters={SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
)
_HEADS = {"head_dim": 16, "num_key_value_heads": 1}
GEMMA4 = MODELS["gemma4"].changed(head_dim=16, per_layer_config={"1": _HEADS, "2": _HEADS})
ONE_HEAD = {layer: {"num_key_value_heads": 1} for layer in "12"}


def same_logits(model: TinyModel, directory: Path, **changed: Any) -> float:
    """The largest difference to transformers' logits, of a config.json with these keys."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    expected = reference_logits(reference_of(model, directory), PROMPT)
    ours = load(directory)
    return float(np.abs(ours.logits(ours.prefill(PROMPT)[1]) - expected).max())


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        pytest.param(MODELS["hunyuan_v1_moe"], HUNYUAN, id="hunyuan"),
        pytest.param(MODELS["mimo_v2_flash"], MIMO, id="mimo"),
        pytest.param(WINDOWS_ALONE, {}, id="step, windows alone"),
    ],
)
def test_published_keys_mean_what_transformers_reads(
    tmp_path: Path, model: TinyModel, changed: dict[str, Any]
) -> None:
    assert same_logits(model, write_tiny_model(tmp_path, model), **changed) < 1e-4


def test_a_large_epsilon_counts_in_norms_of_scaled_queries(tmp_path: Path) -> None:
    model = MODELS["llama4"].changed(rope_scaling=YARN | {"factor": 16.0})
    assert same_logits(model, write_tiny_model(tmp_path, model), rms_norm_eps=0.05) < 1e-4


def test_layers_of_gemma4_may_all_have_the_same_heads(tmp_path: Path) -> None:
    same = {
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
    }
    model = MODELS["gemma4"].changed(**same)
    assert same_logits(model, write_tiny_model(tmp_path, model), per_layer_config={}) < 1e-4


def test_layers_of_gemma4_may_state_their_heads_alone(tmp_path: Path) -> None:
    """The size of a head is then that of all layers."""
    path = write_tiny_model(tmp_path, GEMMA4) / "config.json"
    whole = open_model_files(tmp_path).config
    path.write_text(json.dumps(json.loads(path.read_text()) | {"per_layer_config": ONE_HEAD}))
    assert open_model_files(tmp_path).config == whole


@pytest.mark.parametrize("original", [False, True], ids=["its names", "published names"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen3_vl_moe", "ernie4_5_vl_moe") else pytest.mark.slow)
        for name in MODELS
        if name != "kimi_k25"  # its vision tower has no small form; test_families.py saves it
    ],
)
def test_what_transformers_saves_loads(tmp_path: Path, family: str, original: bool) -> None:
    model = MODELS[family]
    theirs = reference_of(model, write_tiny_model(tmp_path / "model", model))
    expected = reference_logits(theirs, PROMPT)
    theirs.save_pretrained(tmp_path / "saved", save_original_format=original)
    ours = load(tmp_path / "saved")
    assert np.abs(ours.logits(ours.prefill(PROMPT)[1]) - expected).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2_moe", "ernie4_5_moe", "gemma4", "qwen3_moe"])
def test_a_differing_head_is_read_despite_a_tied_config(tmp_path: Path, family: str) -> None:
    model = replace(MODELS[family], tie_word_embeddings=False)
    directory = write_tiny_model(tmp_path / "apart", model)
    assert same_logits(model, directory, tie_word_embeddings=True, tie_embedding=True) < 1e-4
    assert not open_model_files(directory).config.head.tied
    if model.fits_gguf:
        file = load(write_gguf(tmp_path / "model.gguf", model))
        ours = load(directory)
        np.testing.assert_array_equal(*(each.logits(each.prefill(PROMPT)[1]) for each in (file, ours)))


@pytest.mark.parametrize("kept", ["both", "head"])
def test_a_head_that_is_the_embedding_stays_tied(tmp_path: Path, kept: str) -> None:
    """Under both names, or under the head's alone, as transformers ties them."""
    model = replace(TinyModel(), tie_word_embeddings=True)
    directory = write_tiny_model(tmp_path, model)
    tensors = load_file(directory / "model.safetensors")
    table = (
        tensors["model.embed_tokens.weight"] if kept == "both" else tensors.pop("model.embed_tokens.weight")
    )
    save_file(tensors | {"lm_head.weight": table}, directory / "model.safetensors", {"format": "pt"})
    assert same_logits(model, directory) < 1e-4
    assert open_model_files(directory).config.head.tied
