"""Random weights in block formats, GGUF's and ours, made as fast as random bytes; activations stay finite.

The integers of a block are random bytes; only the scales are chosen, so that the weights of a matrix with K columns
have a standard deviation near 1 / sqrt(K) and a layer neither blows its input up nor makes it vanish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockFormat:
    """A format of weights in blocks.

    `unit_std` is the standard deviation of a weight of a block of random bytes whose scales are all 1. `scale_at` says
    at which byte the block's f16 scale lies, `min_at` the same for the (scale of the) minima.
    """

    name: str
    gguf_type: str
    """Name in gguf.GGMLQuantizationType; empty for formats of ours."""
    columns: int
    bytes: int
    unit_std: float = 1.0
    scale_at: int = -1
    min_at: int = -1
    exponent: bool = False
    """Whether the block's scale is a power of two, whose exponent (E8M0) is its first byte."""
    row_scale: bool = False
    """A row begins with its only scale, an f16."""


# unit_std was computed by dequantising blocks of random bytes; a test does it again.
FORMATS: Final[Mapping[str, BlockFormat]] = {
    f.name: f
    for f in (
        BlockFormat("f32", "F32", 1, 4),
        BlockFormat("f16", "F16", 1, 2),
        BlockFormat("bf16", "BF16", 1, 2),
        BlockFormat("q8_0", "Q8_0", 32, 34, 73.6, scale_at=0),
        BlockFormat("q4_0", "Q4_0", 32, 18, 4.64, scale_at=0),
        BlockFormat("q4_k", "Q4_K", 256, 144, 263.0, scale_at=0, min_at=2),
        BlockFormat("q5_k", "Q5_K", 256, 176, 534.0, scale_at=0, min_at=2),
        BlockFormat("q6_k", "Q6_K", 256, 210, 1370.0, scale_at=208),
        BlockFormat("q4_1", "Q4_1", 32, 20, 4.61, scale_at=0, min_at=2),
        BlockFormat("q5_0", "Q5_0", 32, 22, 9.23, scale_at=0),
        BlockFormat("q5_1", "Q5_1", 32, 24, 9.23, scale_at=0, min_at=2),
        BlockFormat("q2_k", "Q2_K", 256, 84, 13.9, scale_at=80, min_at=82),
        BlockFormat("q3_k", "Q3_K", 256, 110, 43.4, scale_at=108),
        BlockFormat("iq3_xxs", "IQ3_XXS", 256, 98, 142.0, scale_at=0),
        BlockFormat("iq3_s", "IQ3_S", 256, 110, 140.0, scale_at=0),
        BlockFormat("iq2_xxs", "IQ2_XXS", 256, 66, 53.2, scale_at=0),
        BlockFormat("iq2_xs", "IQ2_XS", 256, 74, 55.9, scale_at=0),
        BlockFormat("iq2_s", "IQ2_S", 256, 82, 56.4, scale_at=0),
        BlockFormat("iq1_s", "IQ1_S", 256, 50, 7.21, scale_at=0),
        BlockFormat("tq1_0", "TQ1_0", 256, 54, 0.817, scale_at=52),
        BlockFormat("iq4_xs", "IQ4_XS", 256, 136, 1250.0, scale_at=0),
        BlockFormat("mxfp4", "MXFP4", 32, 17, 2.93, exponent=True),
        # Ours; GGUF has no type for them.
        BlockFormat("int8", "", 128, 130, 73.6, scale_at=0),
        BlockFormat("int4", "", 64, 36, 4.61, scale_at=0, min_at=2),
        BlockFormat("int8_channel", "", 32, 32, 73.6, row_scale=True),
        BlockFormat("int4_channel", "", 32, 16, 4.64, row_scale=True),
    )
}

GGUF_FORMATS: Final = {name: f for name, f in FORMATS.items() if f.gguf_type}

_MIN_RATIO: Final = {
    "q4_k": 7.5, "q5_k": 15.5, "q2_k": 1.5, "int4": -7.5, "q4_1": -7.5, "q5_1": -15.5
}  # fmt: skip
"""Mean of a block's integers: what the minimum must take away for weights around zero (K formats subtract it)."""

_LOPSIDED: Final = ("q4_0", "q5_0", "q3_k", "q6_k", "int4_channel")
"""Integers reach from -2^n to 2^n - 1. Scales have either sign, as quantisers write them: with positive ones alone all
weights lean the same way, every activation with them, and every token is routed to the same experts."""


def row_bytes(block_format: BlockFormat, columns: int) -> int:
    """Bytes of one row. ValueError if the row is not made of whole blocks."""
    if columns % block_format.columns:
        raise ValueError(
            f"{block_format.name} needs rows of a multiple of {block_format.columns} weights, not {columns}"
        )
    return 2 * block_format.row_scale + columns // block_format.columns * block_format.bytes


def random_rows(rng: np.random.Generator, block_format: BlockFormat, rows: int, columns: int) -> Bytes:
    """uint8 [rows, row_bytes]: a random matrix in `block_format`."""
    width = row_bytes(block_format, columns)
    words = rng.integers(0, 2**64, (rows * width + 7) // 8, dtype=np.uint64, endpoint=False)
    data = words.view(np.uint8)[: rows * width]
    if block_format.row_scale:
        rows_of_bytes = data.reshape(rows, width)
        scales = rng.uniform(0.5, 1.45, rows) / (block_format.unit_std * columns**0.5)
        if block_format.name in _LOPSIDED:
            scales[::2] *= -1.0
        else:
            np.copyto(rows_of_bytes[:, 2:], 0x81, where=rows_of_bytes[:, 2:] == 0x80)
        _put_f16(rows_of_bytes, 0, scales.astype(np.float16))
        return rows_of_bytes
    if block_format.exponent:
        wanted = 127 - round(np.log2(block_format.unit_std * columns**0.5))
        exponents = data.reshape(-1, block_format.bytes)[:, 0]
        exponents[:] = wanted - (exponents & 1) * (exponents >> 7)  # a quarter of the values is half as large
        return data.reshape(rows, width)
    if block_format.scale_at < 0:
        return _plain_floats(data, block_format.name, columns).reshape(rows, width)
    blocks = data.reshape(-1, block_format.bytes)
    if block_format.name in ("q8_0", "int8"):
        # Quantisers keep to -127 .. 127.
        np.copyto(blocks[:, 2:], 0x81, where=blocks[:, 2:] == 0x80)
    # One of 256 scales around the wanted one, by a byte that is random anyway.
    spread = np.linspace(0.5, 1.45, 256) / (block_format.unit_std * columns**0.5)
    if block_format.name in _LOPSIDED:
        spread[::2] *= -1.0
    table = spread.astype(np.float16)
    chosen = blocks[:, block_format.scale_at].copy()
    _put_f16(blocks, block_format.scale_at, table[chosen])
    if block_format.min_at >= 0:
        minima = (spread * _MIN_RATIO[block_format.name]).astype(np.float16)
        _put_f16(blocks, block_format.min_at, minima[chosen])
    return data.reshape(rows, width)


def _put_f16(blocks: Bytes, at: int, values: npt.NDArray[np.float16]) -> None:
    blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)


def _plain_floats(data: Bytes, name: str, columns: int) -> Bytes:
    """Keeps sign, mantissa and the two low bits of the exponent random; the rest of the exponent sets the size."""
    # Magnitudes 2^e .. 2^(e+4), evenly in log2: their root mean square is 2^e * 7.04.
    exponent = round(np.log2(1 / (7.04 * columns**0.5)))
    if name == "f32":
        words: npt.NDArray[np.uint32] = data.view(np.uint32)
        words &= np.uint32(0x81FF_FFFF)
        words += np.uint32((exponent + 127) << 23)
        return data
    halves: npt.NDArray[np.uint16] = data.view(np.uint16)
    keep, bias, shift = (0x81FF, 127, 7) if name == "bf16" else (0x8FFF, 15, 10)
    halves &= np.uint16(keep)
    halves += np.uint16(max(1, exponent + bias) << shift)
    return data
