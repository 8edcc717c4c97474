"""NVFP4 in GGUF files: blocks in the layout of our format. The tensor's scale, if not 1, is in a tensor `X.scale`
beside `X.weight`: one float32, or one for each expert of a stack.

`X.input_scale` gives another engine's activation rounding. It is not read: our kernels have a scale for each 32
activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.gguf_file import GgufTensor
from twofold.weights.schemes.floats import head_of, row_type

TYPE: Final = "NVFP4"
FORMAT: Final = "nvfp4"
_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"


def scale_tensor(tensor: GgufTensor, tensors: Mapping[str, GgufTensor]) -> GgufTensor | None:
    """The scale tensor of `tensor`, if any. Raises ModelLoadError unless it is one float32, or one for each matrix."""
    scale = tensors.get(tensor.name.removesuffix(_WEIGHT) + _SCALE)
    if scale is not None and (scale.type_name != "F32" or scale.shape not in ((1,), tensor.shape[:-2])):
        raise ModelLoadError(
            f"{scale.file}: tensor {scale.name} is {scale.type_name} {list(scale.shape)}, expected F32 [1] or one for "
            f"each matrix of {tensor.name}; download it again"
        )
    return scale


def without_scales(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """`tensors` without the scale tensors of those in NVFP4."""
    names = [name.removesuffix(_WEIGHT) for name, tensor in tensors.items() if tensor.type_name == TYPE]
    belong = {name + suffix for name in names for suffix in (_SCALE, _INPUT_SCALE)}
    return {name: tensor for name, tensor in tensors.items() if name not in belong}


def with_heads(
    raw: npt.NDArray[np.uint8], columns: int, scales: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.uint8]:
    """Rows of our format from a tensor's blocks. Raises ValueError for an invalid scale."""
    blocks = raw.view(row_type(columns)["blocks"].base).reshape(-1, columns // 64)
    out = np.empty(len(blocks), row_type(columns))
    out["blocks"] = blocks
    heads = [1.0] if scales is None else [head_of(float(scale), False) for scale in scales.reshape(-1)]
    out["head"] = np.repeat(np.array(heads, np.float32), len(blocks) // len(heads))
    return out.view(np.uint8)
