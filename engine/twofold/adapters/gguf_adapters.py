"""llama.cpp's GGUF adapters: general.type "adapter", adapter.type "lora".

The factors of a tensor NAME are NAME.lora_a and NAME.lora_b: A [rank, columns] and B [rows, rank]; of stacked experts
[experts, ...]; of the embedding A is transposed. The scale is adapter.lora.alpha / rank, or 1 where alpha is 0 or
missing. Names and the order of rows are those of the model's GGUF files, and are translated as its weights are.

Sources: llama.cpp `src/llama-adapter.cpp`, `src/llama-adapter.h` (`get_scale`), `convert_lora_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from twofold.adapters.adapter import F32
from twofold.adapters.base_shapes import GgufMatrix
from twofold.adapters.factors import OTHER_MODEL, AdapterTensors, Pair, Products, read_only, scaled
from twofold.adapters.routed_experts import ExpertReader, LayerFactors
from twofold.adapters.settings import AdapterSettings
from twofold.api.errors import ModelLoadError
from twofold.weights.gguf_file import GgufFile
from twofold.weights.gguf_source import GgufSource

_EXPERTS: Final = re.compile(
    r"blk\.(?P<layer>\d{1,6})\.ffn_(?P<part>gate_up|gate|up|down)(?:_exps|\.(?P<number>\d{1,6}))\.weight",
    re.ASCII,
)
_EMBEDDING: Final = "token_embd.weight"
_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")
_Q8_COLUMNS: Final = 32
_ALORA: Final = "adapter.alora.invocation_tokens"


class GgufTensors(AdapterTensors):
    """The tensors of a GGUF file; those of Q8_0 are dequantised."""

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self.source.entry(name)
        if entry.dtype not in _TYPES:
            raise self.refused(
                name, f"is {entry.dtype}, expected one of {', '.join(_TYPES)}; convert the adapter again"
            )
        return entry.shape

    def read(self, name: str) -> F32:
        shape = self.shape(name)
        if self.source.entry(name).dtype != "Q8_0":
            return self.source.vector(name, shape)
        rows = np.concatenate([matrix.data for matrix in self.source.stack(name, shape)])
        blocks = rows.reshape(-1, 2 + _Q8_COLUMNS)  # a float16 scale, 32 int8
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        values: F32 = (blocks[:, 2:].view(np.int8) * scales).reshape(shape)
        if not np.isfinite(values).all():
            raise self.refused(
                name, "holds a NaN or an infinity, expected finite weights; the file is damaged"
            )
        return values


@dataclass(frozen=True)
class GgufAdapter:
    """A GGUF adapter whose header has been read."""

    tensors: GgufTensors
    settings: AdapterSettings
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path, architecture: str) -> GgufAdapter:
        """Raises ModelLoadError for a damaged header, another kind of file, or another architecture unless it is ""."""
        file = GgufFile.open(path)
        fields = file.fields
        for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
            _expect(path, fields, key, expected)
        if architecture:
            _expect(path, fields, "general.architecture", architecture)
        if _ALORA in fields:
            raise ModelLoadError(f"{path}: has {_ALORA}: this variant of LoRA is not computed")
        alpha = fields.get("adapter.lora.alpha", 0.0)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < 1e30:
            raise ModelLoadError(f"{path}: adapter.lora.alpha is {alpha!r}, expected a number of at least 0")
        base_name = fields.get("general.base_model.0.name")
        settings = AdapterSettings(
            path, float(alpha) or None, base_name=base_name if isinstance(base_name, str) else ""
        )
        files = tuple(dict.fromkeys((path, *(tensor.file for tensor in file.tensors.values()))))
        return cls(GgufTensors(path, GgufSource(file, ())), settings, files)

    def read(self, products: Products) -> None:
        """Add all products. Raises ModelLoadError for the first tensor that does not fit the base."""
        layers: dict[str, LayerFactors] = {}
        pairs: dict[str, Pair] = {}
        for name in self.tensors.source:
            module, dot, side = name.rpartition(".")
            if not dot or side not in ("lora_a", "lora_b"):
                raise self.tensors.refused(name[:200], "is unknown; expected factors lora_a and lora_b")
            pair = self._expert_pair(products, layers, module, name) or pairs.setdefault(module, Pair())
            pair.put(self.tensors, side[-1], name)
        for module, pair in pairs.items():
            self._add(products, module, pair)
        ExpertReader(self.tensors, self.settings, products).read(layers)

    def _expert_pair(
        self, products: Products, layers: dict[str, LayerFactors], module: str, name: str
    ) -> Pair | None:
        """The pair of routed experts; None: the tensor is another module's."""
        found = _EXPERTS.fullmatch(module)
        if found is None:
            return None
        key = products.base.experts_of_layer(int(found["layer"]))
        if key is None:
            raise self.tensors.refused(
                name, f"the model's layer {int(found['layer'])} has no routed experts; {OTHER_MODEL}"
            )
        layer, part = layers.setdefault(key, LayerFactors()), f"{found['part']}_proj"
        number = None if found["number"] is None else int(found["number"])
        layer.modules[part, number] = module
        if number is None:
            return layer.stacks.setdefault(part, Pair())
        return layer.one.setdefault((part, number), Pair())

    def _add(self, products: Products, module: str, pair: Pair) -> None:
        tensors, names = self.tensors, pair.both(self.tensors)
        matrices = products.base.gguf.get(module)
        if matrices is None:
            raise tensors.refused(names[0], f"the model has no matrix {module} in known order; {OTHER_MODEL}")
        a, b = (tensors.shape(name) for name in names)
        for name, shape in zip(names, (a, b), strict=True):
            if len(shape) != 2:
                raise tensors.refused(name, f"has shape {list(shape)}, expected two dimensions")
        is_embedding = module == _EMBEDDING
        rank = products.check_rank(tensors, names, (a[1] if is_embedding else a[0], b[1]), None)
        rows, columns = (a[0], b[0]) if is_embedding else (b[0], a[1])
        stretches = [self._stretch(products, matrix, (rows, columns), names[1]) for matrix in matrices]
        of_a, of_b = (tensors.read(name) for name in names)
        if is_embedding:
            of_a, of_b = of_b.T, of_a
        of_b = scaled(of_b, self.settings.scale(module, rank), (tensors, names[1]))
        of_a = read_only(of_a)
        for matrix, stretch in zip(matrices, stretches, strict=True):
            part = of_b[stretch]
            if matrix.heads:  # row 2i + half of a head was row half * d/2 + i
                part = part.reshape(matrix.heads, -1, 2, rank).swapaxes(1, 2).reshape(-1, rank)
            products.add(matrix.name, of_a, read_only(part), (tensors, names[1]))

    def _stretch(self, products: Products, matrix: GgufMatrix, given: tuple[int, int], name: str) -> slice:
        """The rows of a tensor that are `matrix`. Raises ModelLoadError for another shape than the base's."""
        rows, columns = given
        first, whole = matrix.rows or (0, rows)
        count = products.base.matrices[matrix.name][0] if matrix.rows else rows
        if rows != whole:
            raise self.tensors.refused(name, f"has {rows} rows, expected {whole}; {OTHER_MODEL}")
        products.check_shape((self.tensors, name), matrix.name, (count, columns))
        return slice(first, first + count)


def _expect(path: Path, fields: Mapping[str, Any], key: str, expected: str) -> None:
    found = fields.get(key)
    if found != expected:
        raise ModelLoadError(
            f"{path}: {key} is {str(found)[:80]!r}, expected {expected!r}; give a LoRA adapter of this model"
        )
