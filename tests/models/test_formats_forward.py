"""A model in every format against a float32 model of the values that its blocks stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.blocks import ops
from twofold.models.model_files import open_model_files

from tests.engine.model_runs import load, random_prompt, rounds_activations
from tests.models.gguf_encoders import SPREADS, encode
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel, tiny_config, write_safetensors, write_tiny_model

# Rows of whole blocks of 256 columns in every matrix. Every token goes to every expert: near a tie, rounding would
# choose another one, which says nothing of the format.
MODEL = TinyModel(
    hidden_size=256, moe_intermediate_size=256, num_heads=8, head_dim=32, num_layers=2, num_experts=4, top_k=4
)


def write_dequantised(quantised: Path, directory: Path, model: TinyModel) -> Path:
    """The tensors of `quantised` as float32, under the same names."""
    write_tiny_model(directory, model)
    tensors = open_model_files(quantised).tensors
    pool = ops.ThreadPool(1)
    weights: dict[str, Any] = {}
    for name in tensors:
        shape = tensors.entry(name).shape
        if len(shape) == 1:
            weights[name] = tensors.vector(name, (shape[0],))
        else:
            stack = [ops.dequantise(pool, matrix) for matrix in tensors.stack(name, shape)]
            weights[name] = np.stack(stack).reshape(shape)
    write_safetensors(directory / "model.safetensors", weights, "float32")
    config = tiny_config(replace(model, dtype="float32"))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def mixed(name: str) -> str:
    """Mixed formats as in Q4_K_M files: some matrices in six bits."""
    return "Q6_K" if "down" in name or "attn_v" in name or "output" in name else "Q4_K"


@pytest.mark.parametrize(
    "kind",
    [
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "Q2_K",
        "Q3_K",
        "IQ3_XXS",
        "mixed",
        "IQ4_XS",
        "NVFP4",
        *SPREADS,
    ],
)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    type_of = mixed if kind == "mixed" else lambda name: kind
    file = write_tiny_gguf(tmp_path / "model.gguf", MODEL, type_of=type_of, encode=encode)
    reference = load(write_dequantised(file, tmp_path / "float32", MODEL))
    ours = load(file)
    formats = {name for layer in ours.model.files.expert_formats() for name in layer}
    assert formats == ({"q4_k", "q6_k"} if kind == "mixed" else {kind.lower()})
    prompt = random_prompt(24)
    expected = reference.logits(reference.prefill(prompt)[1])
    seq, hidden = ours.prefill(prompt, (7, 1))
    got = ours.logits(hidden)
    scale = np.abs(expected).max()
    exact = kind == "F16" or (kind == "BF16" and not rounds_activations("bf16"))
    assert np.abs(got - expected).max() < (1e-4 if exact else 0.05 * scale)
    assert np.median(np.abs(got - expected)) < 0.01 * scale
    # Decoding one token is prefilling one.
    longer = ours.logits(ours.step((seq, [5]))[0])
    np.testing.assert_array_equal(longer[0], ours.logits(ours.prefill([*prompt, 5])[1])[-1])
