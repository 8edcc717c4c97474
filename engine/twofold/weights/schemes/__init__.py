"""Quantisation schemes of Hugging Face checkpoints, by their config.json names; `scheme` has their interface."""

from __future__ import annotations

from twofold.weights.json_file import Fields
from twofold.weights.schemes import transformers_fp8
from twofold.weights.schemes.scheme import Scheme


def parse_scheme(section: Fields) -> Scheme | None:
    """Scheme of `quantization_config`; None for a method without one. Raises ModelLoadError."""
    method = section.text("quant_method", "?")
    if method == "compressed-tensors":
        from twofold.weights.schemes import compressed_tensors

        return compressed_tensors.parse(section)
    if method in ("gptq", "awq"):
        from twofold.weights.schemes import gptq

        return gptq.parse_gptq(section) if method == "gptq" else gptq.parse_awq(section)
    if method in ("modelopt", "modelopt_fp4"):
        from twofold.weights.schemes import modelopt

        return modelopt.parse(section)
    if method in transformers_fp8.METHODS:
        return transformers_fp8.parse(section)
    return None


METHODS = (*transformers_fp8.METHODS, "compressed-tensors", "gptq", "awq", "modelopt")
