"""gpt-oss with experts in MXFP4, as published, as GGUF files have them and as `twofold quantize` writes them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.models.model_files import open_model_files
from twofold.tools.cli.main import main

from tests.engine.model_runs import load, random_prompt
from tests.models.gguf_encoders import encode
from tests.models.transformers_runs import one_torch_thread, reference, reference_logits
from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import YARN, tiny
from tests.tiny_models.writing import tiny_weights, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

PROMPT = random_prompt(40)


def drawn(seed: int) -> TinyFamily:
    """All experts are chosen, so that rounded activations cannot change the choice."""
    r = random.Random(seed)
    kv_heads, experts = r.randint(1, 3), r.randint(2, 6)
    return tiny(
        "gpt_oss", hidden_size=32 * r.randint(1, 4), moe_intermediate_size=32 * r.randint(1, 4),
        num_layers=r.randint(2, 3), num_kv_heads=kv_heads, num_heads=kv_heads * r.randint(1, 4),
        head_dim=2 * r.randint(4, 16),
        num_experts=experts, top_k=experts, sliding_window=r.randint(3, 30), vocab_size=r.randint(320, 340),
        rope_scaling=r.choice((None, YARN | {"truncate": False})), num_shards=r.choice((1, 2)),
        tie_word_embeddings=r.random() < 0.3, mxfp4=True, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 6, 7, 15, 16])  # of others, rounding sums to more
def test_mxfp4_is_the_model_of_its_values_within_the_rounding_of_activations(
    tmp_path: Path, seed: int
) -> None:
    model = drawn(seed)
    exact = write_tiny_model(tmp_path / "exact", replace(model, mxfp4=False))
    write_values(exact, model)
    expected = reference_logits(reference(exact), PROMPT)
    floats = load(exact)
    assert np.abs(floats.logits(floats.prefill(PROMPT)[1]) - expected).max() < 1e-4 * np.abs(expected).max()
    published = load(write_tiny_model(tmp_path / "hf", model))
    assert set(published.model.files.expert_formats()) == {("mxfp4",) * 3}
    _, hidden = published.prefill(PROMPT)
    got, scale = published.logits(hidden), np.abs(expected).max()
    assert np.abs(got - expected).max() < 0.05 * scale
    assert np.median(np.abs(got - expected)) < 0.01 * scale
    np.testing.assert_array_equal(published.prefill(PROMPT, (7, 1, 13))[1], hidden)
    if model.rope_scaling is None:
        kinds = lambda name: "MXFP4" if "_exps" in name else "F32"  # noqa: E731
        file = load(write_tiny_gguf(tmp_path / "m.gguf", model, type_of=kinds, encode=encode))
        assert set(file.model.files.expert_formats()) == {("mxfp4",) * 3}
        np.testing.assert_array_equal(file.logits(file.prefill(PROMPT)[1]), got)


def write_values(directory: Path, model: TinyFamily) -> None:
    """Values of the codes of `model`, as float32."""
    from tests.tiny_models.writing import write_weights

    write_weights(directory, tiny_weights(model), num_shards=model.num_shards)


def test_mxfp4_from_a_directory_is_read_exactly(tmp_path: Path) -> None:
    """Every expert's values, dequantised, against the weights that were written."""
    model = tiny("gpt_oss", hidden_size=96, moe_intermediate_size=32, mxfp4=True)
    files = open_model_files(write_tiny_model(tmp_path, model))
    weights, pool = tiny_weights(model), ops.ThreadPool(1)
    biases = files.expert_biases(1)
    for number, (gate, up, down) in enumerate(files.expert_weights(1)):
        both = weights["model.layers.1.mlp.experts.gate_up_proj"][number].T
        np.testing.assert_array_equal(ops.dequantise(pool, gate), both[0::2])
        np.testing.assert_array_equal(ops.dequantise(pool, up), both[1::2])
        np.testing.assert_array_equal(
            ops.dequantise(pool, down), weights["model.layers.1.mlp.experts.down_proj"][number].T
        )
        bias = weights["model.layers.1.mlp.experts.gate_up_proj_bias"][number]
        np.testing.assert_array_equal(biases[number, :64], np.concatenate([bias[0::2], bias[1::2]]))


def test_transformers_reads_the_same_values_of_mxfp4() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3), np.uint8)
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    from twofold.weights.weight_format import WeightMatrix

    for number in range(2):
        matrix = WeightMatrix(blocks[number].reshape(6, 48), "mxfp4", 96, scales[number])
        np.testing.assert_array_equal(ops.dequantise(ops.ThreadPool(1), matrix), theirs[number].numpy().T)


@pytest.mark.parametrize("target", ["mxfp4", "q8_0"])
def test_quantised_experts_keep_their_biases(tmp_path: Path, target: str) -> None:
    """From floats and from MXFP4, which is not rounded to MXFP4 again."""
    model = tiny("gpt_oss", hidden_size=64, moe_intermediate_size=64, num_experts=4, top_k=4, mxfp4=True)
    source = write_tiny_model(tmp_path / "hf", model)
    assert main(["quantize", str(source), str(tmp_path / "q"), "--format", target, "--max-tokens", "0"]) == 0
    old, new = open_model_files(source), open_model_files(tmp_path / "q")
    assert set(new.expert_formats()) == {(target,) * 3}
    np.testing.assert_array_equal(old.expert_biases(2), new.expert_biases(2))
    pool = ops.ThreadPool(1)
    for theirs, ours in zip(old.expert_weights(0), new.expert_weights(0), strict=True):
        for before, after in zip(theirs, ours, strict=True):
            values, kept = ops.dequantise(pool, before), ops.dequantise(pool, after)
            assert np.abs(values - kept).max() <= (0 if target == "mxfp4" else 0.01 * np.abs(values).max())
    assert main(["doctor", str(tmp_path / "q")]) == 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("_scales", None, "gate_up_proj_scales beside them"),
        ("_scales", lambda shape: [*shape[:-1], shape[-1] + 1], "expected U8"),
        (
            "_blocks",
            lambda shape: [*shape[:-2], shape[-2] * 2, shape[-1] // 2],
            "expected U8 blocks of 16 bytes",
        ),
    ],
)
def test_damaged_mxfp4_is_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    import struct

    write_tiny_model(
        tmp_path, tiny("gpt_oss", hidden_size=64, moe_intermediate_size=64, mxfp4=True, num_experts=2)
    )
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    key = f"model.layers.0.mlp.experts.gate_up_proj{name}"
    if change is None:
        header[key + "_old"] = header.pop(key)
    else:
        shape = change(header[key]["shape"])
        begin, end = header[key]["data_offsets"]
        extra = int(np.prod(shape)) - (end - begin)
        header[key]["shape"] = shape
        for entry in header.values():
            if "data_offsets" in entry:
                first, last = entry["data_offsets"]
                entry["data_offsets"] = [first + extra * (first >= end), last + extra * (last >= end)]
        data = data[:end] + bytes(extra) + data[end:]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(ModelLoadError, match=message):
        open_model_files(tmp_path)
