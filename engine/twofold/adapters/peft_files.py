"""PEFT's directories: `adapter_config.json` and `adapter_model.safetensors`.

A tensor's name is `base_model.model.MODULE.lora_A.weight`, MODULE as in the trained model. Other programs leave out
the prefix, or add the adapter's name (`lora_A.default.weight`). Embeddings have `lora_embedding_A` [r, tokens] and
`lora_embedding_B` [columns, r]. Whole matrices (`modules_to_save`) have the name of their weight.

References: peft `utils/save_and_load.py`, `tuners/lora/layer.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from twofold.adapters.adapter import F32
from twofold.adapters.factors import OTHER_MODEL, AdapterTensors, Pair, Products, read_only, scaled
from twofold.adapters.routed_experts import ExpertReader, LayerFactors, place_of
from twofold.adapters.settings import AdapterSettings
from twofold.api.errors import ModelLoadError
from twofold.weights.checkpoint import read_header
from twofold.weights.tensor_source import TensorSource

MODEL_FILE: Final = "adapter_model.safetensors"
MAX_NAME: Final = 400
"""Characters of a tensor's name."""
_FACTOR: Final = re.compile(
    r"(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<adapter>\.[^.]+)??(?P<weight>\.weight)?"
)
_WHOLE: Final = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.weight")
_UNCOMPUTED: Final = (
    ("lora_magnitude_vector", "DoRA"), ("lora_ga_", "LoRA-GA"), ("vera_lambda", "VeRA"), ("ia3_", "IA3"),
    ("hada_", "LoHa"), ("lokr_", "LoKr"), ("lora_E", "AdaLoRA"), ("boft_", "BOFT"), ("oft_", "OFT"),
    ("trainable_tokens", "trainable tokens"), ("lora_diag", "KaSA"), (".bias", "a bias"),
    ("lora_experts.", "KTransformers' additional experts"),
)  # fmt: skip
"""Parts of names, and what they belong to."""
_NOT_READ: Final = ("lora_experts.safetensors", "new_embeddings.safetensors", "new_embeddings.bin")
"""Further files of adapters: KTransformers' additional experts, embeddings of additional tokens."""


class PeftReader:
    """Sorts the tensors of one file by what they change, then reads them."""

    def __init__(self, tensors: AdapterTensors, settings: AdapterSettings, products: Products) -> None:
        self._tensors, self._settings, self._products = tensors, settings, products
        self._pairs: dict[tuple[str, bool], Pair] = {}
        self._layers: dict[str, LayerFactors] = {}
        self._whole: dict[str, str] = {}

    def read(self) -> dict[str, F32]:
        """Add all products; returns the matrices that are replaced. Raises ModelLoadError for the first fault."""
        for name in self._tensors.source:
            self._sort(name)
        for (module, embedding), pair in self._pairs.items():
            self._add(module, pair, embedding=embedding)
        ExpertReader(self._tensors, self._settings, self._products).read(self._layers)
        return {key: read_only(self._tensors.read(name)) for key, name in self._whole.items()}

    def _sort(self, name: str) -> None:
        """Note what a tensor is by its name. Raises ModelLoadError for one that is not computed."""
        if len(name) > MAX_NAME:
            raise self._tensors.refused(
                f"{name[:80]}…", f"has {len(name)} characters, expected at most {MAX_NAME}"
            )
        for part, kind in _UNCOMPUTED:
            if part in name:
                raise self._tensors.refused(
                    name, f"is of {kind}, which is not computed; expected LoRA's A and B"
                )
        inner = name.removeprefix("base_model.model.")
        found = _FACTOR.fullmatch(inner)
        if found is None or (found["weight"] is None and not found["embedding"]):
            self._note_whole(inner, name)
            return
        module = found["module"]
        pair = place_of(self._layers, module)
        if pair is None:
            pair = self._pairs.setdefault((module, bool(found["embedding"])), Pair())
        pair.put(self._tensors, found["side"], name)

    def _note_whole(self, inner: str, name: str) -> None:
        base, found = self._products.base, _WHOLE.fullmatch(inner)
        key = base.matrix_name(found["module"]) if found else None
        if found and key is None:
            raise self._tensors.refused(name, f"the model has no matrix {found['module']}; {OTHER_MODEL}")
        if key is None or key not in base.replaceable:
            raise self._tensors.refused(
                name,
                f"is unknown; expected factors A and B, or one of {', '.join(sorted(base.replaceable))} as a whole",
            )
        if key in self._whole:
            raise self._tensors.refused(
                name, f"replaces {key} as {self._whole[key]} does; expected one of them"
            )
        shape, expected = self._tensors.shape(name), base.matrices[key]
        if shape != expected:
            raise self._tensors.refused(
                name, f"replaces {key} with shape {list(shape)}, expected {list(expected)}; {OTHER_MODEL}"
            )
        self._whole[key] = name

    def _add(self, module: str, pair: Pair, *, embedding: bool) -> None:
        names = pair.both(self._tensors)
        a, b = (self._tensors.shape(name) for name in names)
        for name, shape in zip(names, (a, b), strict=True):
            if len(shape) != 2:
                raise self._tensors.refused(name, f"has shape {list(shape)}, expected two dimensions")
        key = self._products.base.matrix_name(module)
        if key is None:
            raise self._tensors.refused(names[0], f"the model has no matrix {module}; {OTHER_MODEL}")
        expected = self._settings.rank_of(module)
        rank = self._products.check_rank(self._tensors, names, (a[0], b[1]), expected)
        rows, columns = (a[1], b[0]) if embedding else (b[0], a[1])
        self._products.check_shape((self._tensors, names[1]), key, (rows, columns))
        of_a, of_b = (self._tensors.read(name) for name in names)
        if embedding:  # the change of the embedding is the transpose of B A
            of_a, of_b = of_b.T, of_a.T
        of_b = scaled(of_b, self._settings.scale(module, rank), (self._tensors, names[1]))
        self._products.add(key, read_only(of_a), read_only(of_b), (self._tensors, names[1]))


def open_tensors(file: Path) -> AdapterTensors:
    """The tensors of a safetensors file. Raises ModelLoadError if it is missing or damaged."""
    return AdapterTensors(file, TensorSource(file, read_header(file)))


def check_directory(directory: Path, *, required: bool) -> None:
    """Raises ModelLoadError for files of an adapter that are not read; `required`: also without MODEL_FILE."""
    for name in _NOT_READ:
        if (directory / name).exists():
            raise ModelLoadError(
                f"{directory}: holds {name}, which is not computed; expected {MODEL_FILE} alone"
            )
    if (directory / MODEL_FILE).exists():
        return
    parts = sorted(path.name for path in directory.glob("adapter_model-*.safetensors"))
    if parts:
        raise ModelLoadError(
            f"{directory}: holds {parts[0]}, a part of an adapter; expected one {MODEL_FILE}"
        )
    pickles = sorted(path.name for ending in ("bin", "pt", "pth") for path in directory.glob(f"*.{ending}"))
    if pickles:
        raise ModelLoadError(
            f"{directory}: holds {pickles[0]}, a pickle, which can run code; expected {MODEL_FILE}: save the adapter "
            "with safe_serialization=True"
        )
    if required:
        raise ModelLoadError(
            f"{directory}: holds no {MODEL_FILE}; expected a directory as PEFT saves adapters"
        )
