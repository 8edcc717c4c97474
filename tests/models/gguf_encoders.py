"""Rows of the GGUF types that neither the gguf package nor `ops.quantise_rows` makes. Plain, and no good quantisers."""

from __future__ import annotations

import functools
from typing import Any

import gguf
import numpy as np
from twofold._testing import kernels
from twofold.blocks import ops

from benchmarks.models.random_blocks import FORMATS as BLOCKS
from benchmarks.models.random_blocks import random_rows as random_blocks


def nearest(values: Any, table: Any) -> Any:
    """The index of the nearest entry of a sorted table."""
    middle = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middle, values).astype(np.uint8)


def iq4_xs(rows: Any) -> Any:
    curve = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    runs = rows.reshape(len(rows), -1, 8, 32)
    wanted = np.abs(runs).max(-1) / 115
    d = (wanted.max(-1) / 31).astype(np.float16)
    size = d.astype(np.float32)[..., None]
    scales = np.clip(np.rint(wanted / size), 1, 31) * np.where(np.arange(8) % 2, -1, 1)  # of either sign
    codes = nearest(runs / (size * scales)[..., None], curve)
    bits = (scales + 32).astype(np.uint16)
    out = np.empty((*d.shape, 136), np.uint8)
    out[..., :2] = d[..., None].view(np.uint8)
    out[..., 2:4] = (
        ((bits >> 4) << (2 * np.arange(8, dtype=np.uint16)))
        .sum(-1, dtype=np.uint16)[..., None]
        .view(np.uint8)
    )
    out[..., 4:8] = (bits[..., 0::2] & 15) | (bits[..., 1::2] & 15) << 4
    out[..., 8:] = (codes[..., :16] | codes[..., 16:] << 4).reshape(*d.shape, 128)
    return out.reshape(len(rows), -1)


def nvfp4(rows: Any) -> Any:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    sixteens = rows.reshape(len(rows), -1, 4, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(sixteens).max(-1) / 6)
    sizes = np.maximum(gguf.quants.NVFP4.ue4m3_to_fp32(scales) * 2, 2.0**-10).astype(np.float32)
    codes = nearest(np.abs(sixteens) / sizes[..., None], table) | (sixteens < 0).astype(np.uint8) << 3
    q = codes[..., :8] | codes[..., 8:] << 4
    return np.concatenate([scales, q.reshape(*scales.shape[:2], 32)], -1).reshape(len(rows), -1)


SPREADS = {
    "IQ2_XXS": 53.2, "IQ2_XS": 55.9, "IQ2_S": 56.4, "IQ3_S": 140.0, "IQ1_S": 7.2, "IQ1_M": 7.2, "TQ1_0": 0.82,
    "TQ2_0": 1.22,
}  # fmt: skip
"""Size of the weights of a block of random bytes whose scale is 1, of types that nothing here quantises to."""


def random_rows(rows: Any, kind: str) -> Any:
    """Random weights of size 1 / sqrt(columns) instead of `rows`, scales of either sign."""
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(rows.size)
    blocks = rng.integers(0, 256, (rows.size // block_columns, block_bytes), np.uint8)
    scales = rng.uniform(0.5, 1.45, (len(blocks), 2)) * rng.choice([-1, 1], (len(blocks), 2))
    scales /= SPREADS[kind] * rows.shape[-1] ** 0.5
    kernels.put_scales(blocks, kind.lower(), scales.astype(np.float16).view(np.uint16))
    return blocks.reshape(len(rows), -1)


ENCODERS = {"IQ4_XS": iq4_xs, "NVFP4": nvfp4} | {
    kind: functools.partial(random_rows, kind=kind) for kind in SPREADS
}


def encode(values: Any, kind: str) -> Any:
    """Formats that the gguf package reads but does not write; any codes do for the lowest bits."""
    rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
    if kind in ENCODERS:
        return ENCODERS[kind](rows).reshape(*values.shape[:-1], -1)
    if kind in ("Q4_1", "Q5_0", "Q5_1"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    if kind in ("Q2_K", "Q3_K", "IQ3_XXS"):
        drawn = random_blocks(np.random.default_rng(rows.size), BLOCKS[kind.lower()], *rows.shape)
        return drawn.reshape(*values.shape[:-1], -1)
    packed = ops.quantise_rows(ops.ThreadPool(1), rows, kind.lower())
    return packed.reshape(*values.shape[:-1], -1)
