"""Storage of a checkpoint's tensors as its configuration states it; never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twofold.api.errors import ModelLoadError
from twofold.weights.block_formats import QUANT_METHOD, parse_block_formats
from twofold.weights.json_file import Fields
from twofold.weights.mxfp4_tensors import QUANT_METHOD as MXFP4
from twofold.weights.schemes import METHODS, parse_scheme
from twofold.weights.schemes.scheme import Scheme


@dataclass(frozen=True)
class Quantization:
    """Storage of a directory's tensors, beyond their own types."""

    block_formats: Mapping[str, str]
    """Format by tensor name, for a directory written by `twofold quantize`."""
    scheme: Scheme | None = None
    mxfp4: bool = False
    """Whether there are matrices in the layout of `mxfp4_tensors.py`."""


def read_quantization(fields: Fields) -> Quantization:
    """Quantisation from config.json or its text part. Raises ModelLoadError for an unsupported one."""
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
    known = ", ".join(map(repr, (MXFP4, *METHODS, QUANT_METHOD)))
    raise ModelLoadError(
        f"{fields.where}: {name} (quant_method {method!r}) is not supported, expected one of {known}; "
        "use a float32, bfloat16, float16 or FP8 checkpoint, or a GGUF file"
    )
