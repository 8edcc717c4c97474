"""`quantization_config` of a directory written by `twofold quantize`: the block format of its U8 tensors.

    "quantization_config": {"quant_method": "twofold", "version": 1, "fingerprint": "…",
                            "tensors": {"model.layers.0.self_attn.q_proj.weight": "q4_k", …}}

Such a tensor is stored as U8 with the bytes of a row as its last dimension; a row's blocks are those of
kernels/include/twofold/formats/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.weights.json_file import Fields
from twofold.weights.tensor_source import TensorEntry
from twofold.weights.weight_format import BLOCK_FORMATS, FORMATS

QUANT_METHOD: Final = "twofold"
VERSION: Final = 1


def quantization_config(formats: Mapping[str, str], fingerprint: str) -> dict[str, Any]:
    """The section of config.json that `parse_block_formats` reads."""
    return {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "fingerprint": fingerprint,
        "tensors": dict(formats),
    }


def parse_block_formats(section: Fields) -> dict[str, str]:
    """Format by tensor name. Raises ModelLoadError for an unknown version or format."""
    version = section.integer("version")
    if version != VERSION:
        raise section.error(
            "version", version, f"{VERSION}: another version of Twofold wrote it, use that one"
        )
    tensors = section.section("tensors")
    if tensors is None:
        raise section.error("tensors", None, "an object of tensor names and formats")
    for name in tensors.data:
        format = tensors.text(name)
        if format not in BLOCK_FORMATS:
            raise tensors.error(name, format, f"one of {', '.join(BLOCK_FORMATS)}")
    return dict(tensors.data)


def with_block_formats(
    entries: Mapping[str, TensorEntry], formats: Mapping[str, str], where: Path
) -> dict[str, TensorEntry]:
    """`entries` with the named ones typed as blocks. Raises ModelLoadError if one is missing or is not bytes."""
    result = dict(entries)
    for name, format in formats.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelLoadError(
                f"{where}: quantization_config names tensor {name}, which is in no file; quantise the model again"
            )
        block = FORMATS[format]
        width = entry.shape[-1] - block.row_head_bytes if len(entry.shape) >= 2 else -1
        if entry.dtype != "U8" or width < 0 or width % block.block_bytes:
            raise ModelLoadError(
                f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected U8 rows of whole {format} "
                f"blocks of {block.block_bytes} bytes; quantise the model again"
            )
        columns = width // block.block_bytes * block.block_columns
        result[name] = replace(entry, dtype=format, shape=(*entry.shape[:-1], columns), format=format)
    return result
