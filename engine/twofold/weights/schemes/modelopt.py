"""NVIDIA ModelOpt: NVFP4 and FP8, one of them for all modules or each module's own ("MIXED_PRECISION").

    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", …]}

or, in a file of its own beside config.json, {"quantization": {"quant_algo": "NVFP4", "exclude_modules": […]}}.
Reference: `modelopt.torch.export`; its NVFP4 is dequantised as in `qtensor/nvfp4_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from twofold.weights.json_file import Fields, read_json_object
from twofold.weights.schemes.floats import float8_matrix, nvfp4_matrix
from twofold.weights.schemes.scheme import IGNORED_TENSORS, SchemeMatrix, no_group, of_modules
from twofold.weights.tensor_source import TensorEntry

SEPARATE_FILE: Final = "hf_quant_config.json"
_ALGORITHMS: Final = ("NVFP4", "FP8")
_MIXED: Final = "MIXED_PRECISION"
_PARTS: Final = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class ModelOpt:
    """The algorithm of all modules, or of each module."""

    where: str
    algorithm: str
    excluded: tuple[str, ...]
    """Patterns of unquantised modules."""
    layers: Mapping[str, str]
    """Algorithm by module, if each has its own."""
    left_out: tuple[tuple[str, str], ...] = IGNORED_TENSORS

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        found = []
        for module, parts in of_modules(entries, "weight", _PARTS).items():
            if "weight_scale" not in parts and parts["weight"].dtype not in ("U8", "F8_E4M3"):
                continue
            if self._algorithm_of(module, parts["weight"]) == "NVFP4":
                found += nvfp4_matrix(module, parts, "weight_scale_2", divides=False)
            else:
                found += float8_matrix(f"{module}.weight", parts, "weight_scale")
        return found

    def _algorithm_of(self, module: str, entry: TensorEntry) -> str:
        # A module may be named with or without the prefix of an outer model.
        named = (name for name in self.layers if module == name or module.endswith(f".{name}"))
        algorithm = self.algorithm if self.algorithm != _MIXED else self.layers.get(next(named, ""))
        excluded = any(
            fnmatchcase(module, pattern) or module.endswith(f".{pattern}") for pattern in self.excluded
        )
        if algorithm is None or excluded:
            raise no_group(entry, module, self.where)
        return algorithm


def parse(section: Fields) -> ModelOpt:
    """Parse `quantization_config`, or the whole file beside config.json. Raises ModelLoadError for unsupported
    settings."""
    inner = section.section("quantization") or section
    algorithm = _algorithm(inner, (*_ALGORITHMS, _MIXED))
    layers: dict[str, str] = {}
    if algorithm == _MIXED:
        declared = inner.section("quantized_layers")
        if declared is None:
            raise inner.error("quantized_layers", None, "an object of modules with their quant_algo")
        for name in declared.data:
            layer = declared.section(name)
            if layer is None:
                raise declared.error(name, None, "an object with quant_algo")
            layers[name] = _algorithm(layer, _ALGORITHMS)
    name, excluded = inner.get(("exclude_modules", "ignore"))
    if excluded is None:
        excluded = []
    if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
        raise inner.error(name, excluded, "a list of names")
    return ModelOpt(section.where, algorithm, tuple(excluded), layers)


def _algorithm(section: Fields, known: tuple[str, ...]) -> str:
    algorithm = section.text("quant_algo", "?").upper()
    if algorithm not in known:
        raise section.error("quant_algo", algorithm, f"one of {', '.join(known)}")
    if algorithm == "NVFP4" and section.integer("group_size", 16) != 16:
        raise section.error("group_size", section.data["group_size"], "16 for NVFP4")
    return algorithm


def beside(directory: Path) -> ModelOpt | None:
    """Settings in a model directory's own file; None without one. Raises ModelLoadError as `parse`."""
    path = directory / SEPARATE_FILE
    if not path.exists():
        return None
    return parse(Fields(str(path), read_json_object(path, "how the model is quantised")))
