"""Memory size of a model, computed from headers, against the loaded arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twofold.blocks.block_weights import BlockWeights
from twofold.models.model_files import open_model_files
from twofold.models.sizing import WORKING_BYTES, check_host_memory, dense_stretches, measure_model

from tests.engine.device_model_runs import held_by
from tests.tiny_models.writing import TinyModel, tiny_weights, write_tiny_model

MODEL = TinyModel(num_layers=3, mlp_only_layers=(1,))


def matrices(weights: BlockWeights) -> list[Any]:
    return [weights.matrix(part) for part, spec in weights.specs.items() if len(spec.shape) == 2]


@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_the_arrays(tmp_path: Path, layout: Any, dtype: Any) -> None:
    model = replace(MODEL, expert_layout=layout, dtype=dtype)
    directory = write_tiny_model(tmp_path, model)
    size = measure_model(directory)
    files = open_model_files(directory)
    experts = [m for layer in files.config.moe_layers for e in files.expert_weights(layer) for m in e]
    assert size.expert_bytes == sum(matrix.packed_bytes for matrix in experts)
    assert size.one_expert_bytes == (2 * 32 * 48 + 64 * 24) * (4 if dtype == "float32" else 2)
    assert size.num_experts_total == 16
    packed = [files.head.matrix("vocabulary")]
    for layer in files.layers:
        packed += matrices(layer[0][1])
    packed += matrices(files.layers[1][1][1])
    gates = 2 * 8 * 48 * (2 if dtype == "bfloat16" else 4)
    vectors = 4 * (7 * 48 + 3 * 2 * 16)
    expected = (
        files.embedding.matrix("table").source_bytes + sum(m.packed_bytes for m in packed) + gates + vectors
    )
    assert size.dense_bytes == expected
    num_values = sum(tensor.size for tensor in tiny_weights(model).values())
    assert size.file_bytes == num_values * (4 if dtype == "float32" else 2)


def test_what_a_token_costs_between_layers_with_experts(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, replace(MODEL, tie_word_embeddings=True))
    num_bytes, flops, gate_bytes = dense_stretches(open_model_files(directory))
    assert gate_bytes == 8 * 48 * 4
    attention = (64 + 32 + 32) * 48 + 48 * 64
    ffn = 3 * 64 * 48
    assert flops == [2.0 * n for n in (attention + 8 * 48, 2 * attention + ffn + 8 * 48, 320 * 48)]
    packed = (64 + 32 + 32) * 48 + 64 * 64  # o has 48 rows: two panels of 32
    packed_ffn = 2 * 64 * 48 + 64 * 64
    vectors = 2 * 48 + 2 * 16
    between = 2 * packed + packed_ffn + 8 * 48 + 2 * vectors
    assert num_bytes == [4.0 * n for n in (packed + 8 * 48 + vectors, between, 320 * 48)]


def test_kv_bytes_by_hand(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, MODEL)
    assert measure_model(directory).kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert measure_model(directory, kv_cache_dtype="bfloat16").kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert measure_model(directory, kv_cache_dtype="fp8_e4m3").kv_bytes_per_token == 2 * 3 * 2 * 16
    assert measure_model(directory, kv_cache_dtype="q8").kv_bytes_per_token == 2 * 3 * 2 * (16 + 4)


def test_a_tied_embedding_counts_once(tmp_path: Path) -> None:
    untied = measure_model(write_tiny_model(tmp_path / "untied", MODEL))
    tied = measure_model(write_tiny_model(tmp_path / "tied", replace(MODEL, tie_word_embeddings=True)))
    assert untied.dense_bytes - tied.dense_bytes == 320 * 48 * 4


def test_advice_names_what_to_change(tmp_path: Path) -> None:
    size = measure_model(write_tiny_model(tmp_path, MODEL))
    weights = size.dense_bytes + size.expert_bytes + WORKING_BYTES
    assert size.host_bytes(0) == weights

    fits = check_host_memory(size, size.host_bytes(1000), 1000)
    assert fits.fits
    assert fits.max_kv_tokens == 1000

    tight = check_host_memory(size, size.host_bytes(10), 1000)
    assert not tight.fits
    assert tight.max_kv_tokens == 10
    assert "--max-total-tokens to 10 or less" in tight.advice

    hopeless = check_host_memory(size, weights - 1, 1000)
    assert not hopeless.fits
    assert hopeless.max_kv_tokens == 0
    assert "the weights alone need" in hopeless.advice
    assert "add memory" in hopeless.advice


def test_device_bytes(tmp_path: Path) -> None:
    size = measure_model(write_tiny_model(tmp_path, MODEL))
    expected = size.device_dense_bytes + 5 * size.kv_bytes_per_token + 7 * size.one_expert_bytes
    assert size.device_bytes(num_kv_tokens=5, num_slots=7) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights_on_a_device_are_those_that_the_device_model_holds(tmp_path: Path, dtype: Any) -> None:
    import torch
    from twofold.blocks import ops as ops
    from twofold.device.kernels import TorchKernels
    from twofold.device.model import DeviceModel

    files = open_model_files(write_tiny_model(tmp_path, replace(MODEL, dtype=dtype)))
    context = files.config.max_context
    model = DeviceModel(files, ops.ThreadPool(1), torch.device("cpu"), TorchKernels(), context)
    num_bytes = sum(t.numel() * t.element_size() for t in held_by(model, torch.Tensor))
    assert measure_model(tmp_path).device_dense_bytes == num_bytes
