"""MXFP4 in transformers' layout: a matrix is two U8 tensors, `X_blocks` and `X_scales`.

For a stack of matrices, `X_blocks` is [matrices, rows, blocks, 16]; a block is 32 columns, adjacent pairs in one byte.
`X_scales` is [matrices, rows, blocks], their exponents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorEntry

QUANT_METHOD: Final = "mxfp4"
"""Name in config.json's quantization_config."""
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_BLOCK_BYTES: Final = 16


def with_mxfp4(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """`entries` with such tensors combined into matrices with scales. Raises ModelLoadError if the scales are
    missing."""
    result = dict(entries)
    for name, entry in entries.items():
        if not name.endswith(BLOCKS):
            continue
        scales = name.removesuffix(BLOCKS) + SCALES
        *outer, num_blocks, num_bytes = entry.shape if len(entry.shape) >= 3 else (0, 0, 0)
        if entry.dtype != "U8" or num_bytes != _BLOCK_BYTES or scales not in entries:
            raise ModelLoadError(
                f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected U8 blocks of "
                f"{_BLOCK_BYTES} bytes with {scales} beside them; download it again"
            )
        shape = (*outer, 2 * _BLOCK_BYTES * num_blocks)
        result[name] = replace(entry, dtype="MXFP4", shape=shape, format="mxfp4", scales=scales)
    return result
