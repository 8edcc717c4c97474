"""How a checkpoint's tensors are stored, as its configuration says: never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.weights.block_formats import QUANT_METHOD, parse_block_formats
from twofold.weights.json_file import Fields
from twofold.weights.mxfp4_tensors import QUANT_METHOD as MXFP4
from twofold.weights.schemes import METHODS, Scheme, parse_scheme

FP8_BLOCK: Final = 128
"""FP8 checkpoints have one scale for a block of so many rows and columns."""


@dataclass(frozen=True)
class Quantization:
    """How a directory's tensors are stored, beyond their own types."""

    block_formats: Mapping[str, str]
    """Format by tensor name, of a directory that `twofold quantize` wrote."""
    scheme: Scheme | None = None
    mxfp4: bool = False
    """Whether there are matrices as `mxfp4_tensors.py` describes them."""


def read_quantization(fields: Fields) -> Quantization:
    """Of config.json, or of its text part. FP8 with one scale for 128 x 128 weights needs no word; else see `schemes`.

    Raises ModelLoadError for what is quantised otherwise.
    """
    name, _ = fields.get(("quantization_config", "compression_config"))
    quantization = fields.section(name)
    if quantization is None:
        return Quantization({})
    method = quantization.text("quant_method", "?")
    if method == QUANT_METHOD:
        return Quantization(parse_block_formats(quantization))
    if method == MXFP4:
        return Quantization({}, mxfp4=True)
    if (scheme := parse_scheme(quantization)) is not None:
        return Quantization({}, scheme)
    if method != "fp8":
        known = ", ".join(map(repr, ("fp8", MXFP4, *METHODS, QUANT_METHOD)))
        raise ModelLoadError(
            f"{fields.where}: {name} (quant_method {method!r}) is not supported, expected one of {known}; "
            "use a float32, bfloat16, float16 or FP8 checkpoint, or a GGUF file"
        )
    block = quantization.integers("weight_block_size")
    if block != (FP8_BLOCK, FP8_BLOCK):
        raise quantization.error("weight_block_size", list(block), f"[{FP8_BLOCK}, {FP8_BLOCK}]")
    return Quantization({})
