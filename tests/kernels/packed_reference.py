"""Weight formats and activation encodings in plain numpy: random rows, their values, what an encoding holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kernel_reference import F32, F64, to_bf16_bits, widen
from numpy.typing import NDArray
from twofold._core import weight_formats
from twofold._testing import kernels
from twofold.weights.weight_format import WeightMatrix, element_type

U8 = NDArray[np.uint8]
FORMATS = weight_formats()
GGUF_FORMATS = {name: gguf for name, (columns, *_, gguf, _) in FORMATS.items() if gguf and columns > 1}


@dataclass(frozen=True)
class Block:
    """Format properties that a random block needs."""

    size: float
    """Size of the scales that gives weights of about 1."""
    signed: bool = False
    """Whether scales may be negative."""
    exponent: bool = False
    """Whether the scale is a power of two, whose exponent is the first byte."""
    e4m3: int = 0
    """Bytes of a block that are E4M3 scales; the row's head is then an f32."""


BLOCKS = {
    "q8_0": Block(1 / 74, signed=True),
    "q4_0": Block(1 / 5, signed=True),
    "q4_k": Block(1 / 250),
    "q5_k": Block(1 / 500),
    "q6_k": Block(1 / 1400),
    "int8": Block(1 / 74, signed=True),
    "int4": Block(1 / 5, signed=True),
    "int8_channel": Block(1 / 74, signed=True),
    "int4_channel": Block(1 / 5, signed=True),
    "mxfp4": Block(1 / 4, exponent=True),
    "iq4_nl": Block(1 / 60, signed=True),
    "q4_1": Block(1 / 5, signed=True),
    "q5_0": Block(1 / 10, signed=True),
    "q5_1": Block(1 / 10, signed=True),
    "q2_k": Block(1 / 12),
    "q3_k": Block(1 / 45),
    "iq4_xs": Block(1 / 1100, signed=True),
    "iq3_xxs": Block(1 / 140, signed=True),
    "iq2_xxs": Block(1 / 110, signed=True),
    "iq2_xs": Block(1 / 110, signed=True),
    "iq2_s": Block(1 / 110, signed=True),
    "iq3_s": Block(1 / 140, signed=True),
    "iq1_s": Block(1 / 8, signed=True),
    "iq1_m": Block(1 / 8, signed=True),
    "tq1_0": Block(1, signed=True),
    "tq2_0": Block(1, signed=True),
    "nvfp4": Block(1 / 500, e4m3=4),
}


@dataclass(frozen=True)
class Rows:
    """Source rows [rows, row bytes] of a format, and fp8's scales for 128 x 128 weights."""

    format: str
    columns: int
    data: U8
    scales: F32 | None = None

    def values(self) -> F32:
        return kernels.dequantise(self.data, self.format, self.columns, self.scales)

    def packed(self) -> U8:
        return kernels.pack(self.data, self.format, self.columns, self.scales)

    def matrix(self) -> WeightMatrix:
        """As the runtime is given it."""
        return WeightMatrix(self.data.view(element_type(self.format)), self.format, self.columns, self.scales)

    def part(self, begin: int, end: int) -> Rows:
        """Rows [begin, end); begin a multiple of 128 where there are scales."""
        scales = None if self.scales is None else np.ascontiguousarray(self.scales[begin // 128 :])
        return Rows(self.format, self.columns, np.ascontiguousarray(self.data[begin:end]), scales)


def scale_bytes(rows: Rows) -> list[int]:
    """The bytes of a row that hold its scales."""
    _, block_bytes, *_, head, _, _ = FORMATS[rows.format]
    blocks = range(head, rows.data.shape[1], block_bytes)
    if BLOCKS[rows.format].exponent:
        return list(blocks)
    if count := BLOCKS[rows.format].e4m3:
        return [*range(head), *(block + at for block in blocks for at in range(count))]
    ones = np.zeros((1, block_bytes), np.uint8)
    kernels.put_scales(ones, rows.format, np.full((1, 2), 0xFFFF, np.uint16))
    return [*range(head), *(block + at for block in blocks for at in np.flatnonzero(ones).tolist())]


def filled(rows: Rows, fills: Sequence[int]) -> Rows:
    """The same scales, and every other byte of a row the same."""
    data = np.repeat(np.array(fills, np.uint8)[:, None], rows.data.shape[1], axis=1)
    kept = scale_bytes(rows)
    data[:, kept] = rows.data[:, kept]
    return Rows(rows.format, rows.columns, data)


def fitting_columns(format_name: str, columns: int) -> int:
    """`columns` rounded up to whole blocks."""
    block = FORMATS[format_name][0]
    return -(-columns // block) * block


def random_rows(rng: np.random.Generator, format_name: str, rows: int, columns: int) -> Rows:
    """Every code of the format occurs; weights are of size about 1."""
    block_columns, block_bytes, *_, head, _, _ = FORMATS[format_name]
    if format_name in ("f32", "f16", "bf16"):
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        elements = {"f32": x, "f16": x.astype(np.float16), "bf16": to_bf16_bits(x)}[format_name]
        return Rows(format_name, columns, elements.view(np.uint8).reshape(rows, -1))
    data = rng.integers(0, 256, (rows, columns // block_columns, block_bytes), np.uint8)
    if format_name == "fp8":
        data = data.reshape(rows, columns)
        data[(data & 0x7F) == 0x7F] = 0x38  # NaN is refused at load
        grid = (-(-rows // 128), -(-columns // 128))
        return Rows(format_name, columns, data, rng.uniform(0.5, 2, grid).astype(np.float32) / 100)
    block = BLOCKS[format_name]

    def scales(shape: tuple[int, ...]) -> U8:
        values = block.size * rng.uniform(0.3, 1, shape)
        if block.signed:
            values *= rng.choice([-1, 1], shape)
        return values.astype(np.float16)[..., None].view(np.uint8)

    if block.exponent:
        data[..., 0] = 127 + int(np.log2(block.size)) + rng.integers(-1, 2, data.shape[:2])
    flat = data.reshape(-1, block_bytes)
    kernels.put_scales(flat, format_name, scales((len(flat), 2)).view(np.uint16)[..., 0])
    if block.e4m3:  # positive numbers; every other tensor's scale divides
        data[..., : block.e4m3] %= 0x7F
        heads = np.float32(block.size) * rng.uniform(0.3, 1, rows).astype(np.float32)
        heads[1::2] = -1 / heads[1::2]
        return Rows(format_name, columns, np.hstack([heads[:, None].view(np.uint8), data.reshape(rows, -1)]))
    data = data.reshape(rows, -1)
    return Rows(format_name, columns, np.hstack([scales((rows,)), data]) if head else data)


def e4m3(codes: U8) -> F32:
    """Float8 e4m3 (the variant with neither infinities nor a signed NaN of many codes)."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    )
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def plain_values(rows: Rows) -> F32:
    """Values of rows in formats that are not GGUF's, by their definition."""
    data, num_rows = rows.data, len(rows.data)
    if rows.format == "f32":
        return data.view(np.float32)
    if rows.format == "f16":
        return data.view(np.float16).astype(np.float32)
    if rows.format == "bf16":
        return widen(data.view(np.uint16)).astype(np.float32)
    if rows.format == "fp8":
        grid = rows.scales.repeat(128, 0)[:num_rows].repeat(128, 1)[:, : rows.columns]
        return e4m3(data) * grid
    if rows.format == "nvfp4":
        whole = data[:, :4].copy().view(np.float32)[:, :, None]
        blocks = data[:, 4:].reshape(num_rows, -1, 36)
        scale = e4m3(blocks[..., :4]).reshape(num_rows, -1, 1)
        scale = np.where(whole < 0, scale / -whole, scale * whole)
        q = blocks[..., 4:].reshape(num_rows, -1, 8)
        return (scale * E2M1[np.concatenate([q & 15, q >> 4], -1)]).reshape(num_rows, -1)
    if rows.format.endswith("_channel"):
        row_scale, q = data[:, :2].copy().view(np.float16).astype(np.float32), data[:, 2:]
        if rows.format == "int8_channel":
            return row_scale * q.view(np.int8)
        nibbles = np.stack([q & 15, q >> 4], 1).reshape(num_rows, 2, -1, 16).swapaxes(1, 2)
        return row_scale * (nibbles.reshape(num_rows, -1).astype(np.float32) - 8)
    blocks = data.reshape(num_rows, -1, FORMATS[rows.format][1])
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if rows.format == "int8":
        return (scale * blocks[..., 2:].view(np.int8)).reshape(num_rows, -1)
    assert rows.format == "int4"
    least = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    q = np.stack([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).reshape(*blocks.shape[:2], 64)
    return (scale * q.astype(np.float32) + least).reshape(num_rows, -1)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def padded(columns: int) -> int:
    return -(-columns // 256) * 256


def encode_q8(x: F32) -> tuple[NDArray[np.int8], F32, NDArray[np.int32]]:
    """q [M, P], scale [M, P / 32], sums of 16 [M, P / 16] as packed_kernels.h defines them."""
    all_x = np.zeros((len(x), padded(x.shape[1])), np.float32)
    all_x[:, : x.shape[1]] = x
    runs = all_x.reshape(len(x), -1, 32)
    with np.errstate(all="ignore"):
        amax = np.abs(runs).max(-1)  # NaN where there is one
        zero, finite = amax < np.float32(1e-35), np.isfinite(amax)
        scale = np.where(finite, np.where(zero, np.float32(0), amax / np.float32(127)), np.float32(np.nan))
        inverse = np.where(finite & ~zero, np.float32(127) / amax, np.float32(0))
        scaled = np.where(inverse[..., None] == 0, np.float32(0), runs * inverse[..., None])
        q = np.rint(scaled).astype(np.int8)
    sums = q.reshape(len(x), -1, 16).sum(-1, dtype=np.int32)
    return q.reshape(len(x), -1), scale, sums


def encode_q8_token(x: F32) -> tuple[NDArray[np.int8], F32, NDArray[np.int32]]:
    """q [M, P], scale [M], sum [M] as packed_kernels.h defines them."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(1)
        zero, finite = amax < np.float32(1e-35), np.isfinite(amax)
        scale = np.where(finite, np.where(zero, np.float32(0), amax / np.float32(127)), np.float32(np.nan))
        inverse = np.where(finite & ~zero, np.float32(127) / amax, np.float32(0))
        scaled = np.where(inverse[:, None] == 0, np.float32(0), x * inverse[:, None])
    q = np.zeros((len(x), padded(x.shape[1])), np.int8)
    q[:, : x.shape[1]] = np.rint(scaled)
    return q, scale, q.sum(1, dtype=np.int32)


def split_q8_token(rows: U8, columns: int) -> tuple[NDArray[np.int8], F32, NDArray[np.int32]]:
    """The same three out of encoded rows."""
    P = padded(columns)
    after = np.ascontiguousarray(rows[:, P : P + 8])
    return rows[:, :P].view(np.int8), after.view(np.float32)[:, 0], after.view(np.int32)[:, 1]


def split_q8(rows: U8, columns: int) -> tuple[NDArray[np.int8], F32, NDArray[np.int32]]:
    """The same three out of encoded rows."""
    P = padded(columns)
    at = (P, P + P // 8, P + P // 8 + P // 4)
    return (
        rows[:, : at[0]].view(np.int8),
        np.ascontiguousarray(rows[:, at[0] : at[1]]).view(np.float32),
        np.ascontiguousarray(rows[:, at[1] : at[2]]).view(np.int32),
    )


def decoded(rows: U8, kind: str, columns: int) -> F64:
    """The activations that encoded rows stand for [M, columns]."""
    if kind == "f32":
        return np.ascontiguousarray(rows[:, : 4 * columns]).view(np.float32).astype(np.float64)
    if kind == "bf16":
        return widen(np.ascontiguousarray(rows[:, : 2 * columns]).view(np.uint16))
    if kind == "q8_token":
        q, scale, _ = split_q8_token(rows, columns)
        return q[:, :columns] * scale.astype(np.float64)[:, None]
    q, scale, _ = split_q8(rows, columns)
    return (q.reshape(len(rows), -1, 32) * scale.astype(np.float64)[..., None]).reshape(len(rows), -1)[
        :, :columns
    ]
