"""MXFP4 as gpt-oss's checkpoints hold it: plain and slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.tiny_models.writing import F32, Array

U8 = npt.NDArray[np.uint8]
E2M1_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def in_turn(gate: F32, up: F32, axis: int) -> F32:
    """Row 2i of `gate`, row 2i + 1 of `up`."""
    shape = list(gate.shape)
    shape[axis] *= 2
    return np.stack([gate, up], axis=axis + 1).reshape(shape)


def quantised(values: F32) -> tuple[U8, U8]:
    """MXFP4 of [..., columns]: codes [..., columns], exponents [..., columns / 32]."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1)
    exponents = np.where(largest > 0, np.floor(np.log2(np.maximum(largest, 1e-30))) - 2 + 127, 0)
    exponents = np.clip(exponents, 0, 254).astype(np.uint8)
    scaled = blocks / np.exp2(exponents.astype(np.float32) - 127)[..., None]
    codes = np.abs(scaled[..., None] - E2M1_VALUES).argmin(-1).astype(np.uint8)
    return codes.reshape(values.shape), exponents


def dequantised(codes: U8, exponents: U8) -> F32:
    """The values of `quantised`."""
    scales = np.exp2(exponents.astype(np.float32) - 127).repeat(32, -1)
    values: F32 = E2M1_VALUES[codes] * scales
    return values


def stored(weights: Mapping[str, F32]) -> dict[str, Array]:
    """Weights with the experts' matrices as blocks and scales."""
    found: dict[str, Array] = {}
    for name, values in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, exponents = quantised(np.ascontiguousarray(values.swapaxes(1, 2)))
            pairs = codes.reshape(*exponents.shape, 16, 2)
            found[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
            found[f"{name}_scales"] = exponents
        else:
            found[name] = values
    return found
