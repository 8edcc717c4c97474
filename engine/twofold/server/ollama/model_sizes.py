"""Parameters and weight format of a model, from the headers of its files."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.weights.checkpoint import read_header
from twofold.weights.gguf_file import SUFFIX, GgufFile, is_gguf

_PER_ELEMENT: Final = {"I32": 8, "U8": 2}
"""Weights of four bits in one element of a packed tensor."""
_NOT_WEIGHTS: Final = ("scale", "zeros", "zero_point", "g_idx", "_shape")


@dataclass(frozen=True)
class ModelSizes:
    num_parameters: int = 0
    """0: unknown. Weights of packed tensors count as four bits each."""
    format: str = ""
    """Element type that most of the parameters have."""

    @property
    def text(self) -> str:
        """The number of parameters as Ollama writes it; empty if it is unknown."""
        for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.num_parameters >= unit:
                return f"{self.num_parameters / unit:.3g}{name}"
        return ""


@functools.lru_cache(maxsize=64)
def model_sizes(path: Path, written_s: float) -> ModelSizes:
    """Sizes of the model at `path`; written_s: its modification time, so that a changed model is read again."""
    counts: Counter[str] = Counter()
    try:
        for name, kind, shape in _tensors(path):
            if not any(part in name for part in _NOT_WEIGHTS):
                counts[kind] += math.prod(shape) * _PER_ELEMENT.get(kind, 1)
    except (ModelLoadError, OSError):
        return ModelSizes()
    return ModelSizes(counts.total(), counts.most_common(1)[0][0] if counts else "")


def _tensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of every tensor."""
    if is_gguf(path):
        for tensor in GgufFile.open(path).tensors.values():
            yield tensor.name, tensor.type_name, tensor.shape
        return
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
        for entry in read_header(file).values():
            yield entry.name, entry.dtype, entry.shape
    for file in sorted(path.glob(f"*{SUFFIX}"))[:1] if path.is_dir() else ():
        yield from _tensors(file)
