"""Registry of quantisation schemes: the `quant_method`s of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from twofold.weights.json_file import Fields
from twofold.weights.schemes import compressed_tensors, gptq, modelopt
from twofold.weights.schemes.stored import Scheme

METHODS: Final[Mapping[str, Callable[[Fields], Scheme]]] = {
    "compressed-tensors": compressed_tensors.parse,
    "gptq": gptq.parse_gptq,
    "awq": gptq.parse_awq,
    "modelopt": modelopt.parse,
}
"""Readers of `quantization_config` by its `quant_method`; they raise ModelLoadError for unsupported settings."""


def parse_scheme(section: Fields) -> Scheme | None:
    """Scheme of `quantization_config`; None for a method without one. Raises ModelLoadError."""
    parse = METHODS.get(section.text("quant_method", "?").replace("modelopt_fp4", "modelopt"))
    return None if parse is None else parse(section)
