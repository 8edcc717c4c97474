"""Rows of the GGUF types that neither the gguf package nor `ops.quantise_rows` makes. Plain, and no good quantisers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


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


ENCODERS = {"IQ4_XS": iq4_xs, "NVFP4": nvfp4}
