"""Quantised rows: what the formats' definitions say, as little error as the best scale allows, and odd weights."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from packed_reference import BLOCKS, GGUF_FORMATS, Rows, plain_values
from twofold.api.errors import ConfigError, KernelError
from twofold.blocks import ops
from twofold.weights.weight_format import FORMATS, WeightMatrix, source_row_bytes

F32 = npt.NDArray[np.float32]
BLOCK_FORMATS = [name for name in BLOCKS if FORMATS[name].quantised]
# Root mean square error of llama.cpp's quantiser (ggml_quantize_chunk, llama-cpp-python 0.3.36, no importance) on
# `normal_rows()`.
GGML_RMS = {"q8_0": 5.3656e-3, "q4_0": 8.6186e-2, "q4_k": 7.1426e-2, "q5_k": 3.6268e-2, "q6_k": 1.7767e-2}


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


def normal_rows(rows: int = 64, columns: int = 1024) -> F32:
    return np.random.default_rng(0).normal(0.0, 1.0, (rows, columns)).astype(np.float32)


def by_definition(rows: npt.NDArray[np.uint8], format: str, columns: int) -> F32:
    """The weights, by the gguf package or (int8, int4) by the words of their headers."""
    if format in GGUF_FORMATS:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[GGUF_FORMATS[format]])
    if format.endswith("_channel"):
        return plain_values(Rows(format, columns, rows))
    layout = FORMATS[format]
    blocks = rows.reshape(len(rows), -1, layout.block_bytes)
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    if format == "int8":
        values = halves[..., :1] * blocks[..., 2:].view(np.int8)
    else:
        nibbles = np.stack([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).reshape(*blocks.shape[:2], 64)
        values = halves[..., :1] * nibbles + halves[..., 1:]
    return values.reshape(len(rows), columns).astype(np.float32)


def values_of(
    pool: ops.ThreadPool, rows: npt.NDArray[np.uint8], format: str, columns: int, scales: F32 | None = None
) -> F32:
    return ops.dequantise(pool, WeightMatrix(rows, format, columns, scales))


def bits_of(format: str) -> str:
    return "4" if format == "mxfp4" else format.strip("qint")[0]


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_rows_match_the_format(pool: ops.ThreadPool, format: str) -> None:
    x = normal_rows()
    rows = ops.quantise_rows(pool, x, format)
    assert rows.shape == (len(x), source_row_bytes(format, x.shape[1]))
    values = by_definition(rows, format, x.shape[1])
    np.testing.assert_array_equal(values_of(pool, rows, format, x.shape[1]), values)
    assert rms(values - x) < {"8": 0.02, "6": 0.04, "5": 0.06, "4": 0.12}[bits_of(format)]


def test_mxfp4_errs_less_than_with_the_exponent_of_the_largest(pool: ops.ThreadPool) -> None:
    """Which is how the format's authors and gguf choose; and what is mxfp4 already stays as it is."""
    x = normal_rows()
    usual = gguf.dequantize(
        gguf.quantize(x, gguf.GGMLQuantizationType.MXFP4), gguf.GGMLQuantizationType.MXFP4
    )
    values = values_of(pool, ops.quantise_rows(pool, x, "mxfp4"), "mxfp4", x.shape[1])
    assert rms(values - x) < 0.98 * rms(usual - x)
    again = values_of(pool, ops.quantise_rows(pool, usual, "mxfp4"), "mxfp4", x.shape[1])
    np.testing.assert_array_equal(again, usual)


@pytest.mark.parametrize("format", list(GGML_RMS))
def test_error_is_no_larger_than_that_of_llama_cpps_quantiser(pool: ops.ThreadPool, format: str) -> None:
    x = normal_rows()
    values = values_of(pool, ops.quantise_rows(pool, x, format), format, x.shape[1])
    assert rms(values - x) <= 1.001 * GGML_RMS[format]


@pytest.mark.parametrize("format", ["q4_0", "int4", "q4_k", "q5_k", "q6_k"])
def test_no_simple_scale_does_better(pool: ops.ThreadPool, format: str) -> None:
    """Against the range of each block cut evenly: what quantising without a search gives."""
    x = normal_rows(16)
    size = {"q4_0": 32, "int4": 64, "q6_k": 16}.get(format, 32)
    levels = {"q4_0": 15, "int4": 15, "q4_k": 15, "q5_k": 31, "q6_k": 63}[format]
    blocks = x.reshape(-1, size)
    low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    if format in ("q4_0", "q6_k"):
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    step = (high - low) / levels
    even = (np.rint((blocks - low) / step) * step + low).reshape(x.shape)
    values = values_of(pool, ops.quantise_rows(pool, x, format), format, x.shape[1])
    assert rms(values - x) < (1.02 if format == "q6_k" else 0.98) * rms(even - x)


@pytest.mark.parametrize("format", ["q4_0", "q4_k", "q5_k", "q6_k", "int4", "mxfp4"])
def test_importance_moves_the_error_to_other_weights(pool: ops.ThreadPool, format: str) -> None:
    x = normal_rows(16)
    importance = np.ones(x.shape[1], np.float32)
    importance[::4] = 50.0
    plain = values_of(pool, ops.quantise_rows(pool, x, format), format, x.shape[1]) - x
    weighted = values_of(pool, ops.quantise_rows(pool, x, format, importance), format, x.shape[1]) - x
    assert rms(weighted[:, ::4]) < rms(plain[:, ::4])


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: np.zeros_like(x),
        lambda x: np.full_like(x, 0.5),
        lambda x: np.full_like(x, -0.5),
        lambda x: np.abs(x) + 3.0,
        lambda x: -np.abs(x) - 3.0,
        lambda x: x * np.float32(1e-20),
        lambda x: x * np.float32(1e-7),
        lambda x: x * np.float32(1e4),
        lambda x: np.where(np.arange(x.shape[1]) % 61 == 0, x * 100, x).astype(np.float32),
    ],
)
def test_odd_weights_stay_close(pool: ops.ThreadPool, format: str, make: Any) -> None:
    x = np.ascontiguousarray(make(normal_rows(8)))
    values = values_of(pool, ops.quantise_rows(pool, x, format), format, x.shape[1])
    assert np.all(np.isfinite(values))
    # Steps are those of the largest weight of a block; below float16's smallest scale everything is 0.
    block = x.shape[1] if format.endswith("_channel") else 256
    blocks = np.abs(x).reshape(len(x), -1, block).max(axis=2).repeat(block, axis=1)
    steps = 4 if format == "mxfp4" else {"8": 127, "6": 31, "5": 15, "4": 7}[bits_of(format)]
    cut = 2.0 if format == "int4_channel" else 1.0  # the largest of a long row
    assert np.all(np.abs(values - x) <= cut * blocks * 1.3 / steps + 256 * 2.0**-24)


@pytest.mark.parametrize(("format", "dtype"), [("f16", np.float16), ("f32", np.float32)])
def test_plain_formats_round_as_numpy_does(pool: ops.ThreadPool, format: str, dtype: Any) -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65519.9,
        65520.0,
        1e-8,
        6e-8,
        2.98e-8,
        2.9803e-8,
        6.1e-5,
        np.inf,
        -np.inf,
        1e38,
    ]
    x = np.concatenate(
        [np.float32(special), np.random.default_rng(1).normal(0, 1e-4, 1010).astype(np.float32)]
    )[None]
    with np.errstate(over="ignore"):
        assert ops.quantise_rows(pool, x, format).tobytes() == x.astype(dtype).tobytes()
    assert np.isnan(ops.quantise_rows(pool, np.float32([[np.nan]]), format).view(dtype))[0, 0]


def test_bfloat16_rounds_to_nearest_even(pool: ops.ThreadPool) -> None:
    import torch

    x = (
        np.random.default_rng(2)
        .integers(0, 2**32, (1, 4096), dtype=np.uint64)
        .astype(np.uint32)
        .view(np.float32)
    )
    x = np.where(np.isnan(x), np.float32(1.0), x)
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy()
    assert ops.quantise_rows(pool, x, "bf16").tobytes() == expected.tobytes()


def test_rows_do_not_depend_on_the_number_of_threads() -> None:
    x = normal_rows(200, 256)
    one, three = ops.ThreadPool(1), ops.ThreadPool(3)
    for format in BLOCK_FORMATS:
        assert ops.quantise_rows(one, x, format).tobytes() == ops.quantise_rows(three, x, format).tobytes()


def test_fp8_is_read(pool: ops.ThreadPool) -> None:
    import torch

    raw = np.arange(256, dtype=np.uint8)[None].repeat(130, 0)
    scales = np.float32([[0.5, 2.0], [3.0, 0.25]])
    plain = torch.from_numpy(raw).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    expected = plain * scales.repeat(128, 0)[:130].repeat(128, 1)
    np.testing.assert_array_equal(values_of(pool, raw, "fp8", 256, scales), expected)


def test_what_does_not_fit_is_refused(pool: ops.ThreadPool) -> None:
    x = normal_rows(2, 320)
    with pytest.raises(KernelError, match=r"320 columns in format q4_k; expected a multiple of 256"):
        ops.quantise_rows(pool, x, "q4_k")
    with pytest.raises(KernelError, match=r"132128 columns in format int8_channel; .* 32, at most 132104"):
        ops.quantise_rows(pool, np.zeros((1, 132128), np.float32), "int8_channel")
    with pytest.raises(ConfigError, match="never quantised to fp8"):
        ops.quantise_rows(pool, x, "fp8")
    with pytest.raises(ConfigError, match='"q7_k" does not exist'):
        ops.quantise_rows(pool, x, "q7_k")
    with pytest.raises(KernelError, match="importance"):
        ops.quantise_rows(pool, x, "q8_0", np.ones(5, np.float32))
