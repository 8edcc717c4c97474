"""A projector file of llama.cpp (`mmproj-*.gguf`, architecture "clip"): a model's vision tower and projector."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.weights.gguf_file import GgufFile
from twofold.weights.gguf_source import GgufSource
from twofold.weights.json_file import Fields

ARCHITECTURE: Final = "clip"
_PREFIX: Final = "clip.vision."
_OF_VISION: Final = ("v.", "mm.")
_OF_SOUND: Final = "mm.a."


class ProjectorFile:
    """Metadata and tensors of a projector file, checked as they are read."""

    def __init__(self, path: Path) -> None:
        """Read the header. ModelLoadError: damaged, or no projector of pictures."""
        self.path = path
        self._file = GgufFile.open(path)
        fields = self._file.fields
        if (found := fields.get("general.architecture")) != ARCHITECTURE:
            raise ModelLoadError(
                f"{path}: general.architecture is {found!r}, expected {ARCHITECTURE!r}; give a projector file "
                "(mmproj-*.gguf)"
            )
        if not fields.get("clip.has_vision_encoder", False):
            raise ModelLoadError(
                f"{path}: has no vision encoder, expected one; give the projector of pictures"
            )
        of_vision = {
            key.removeprefix(_PREFIX): value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in fields.items()
            if key.startswith(_PREFIX)
        }
        self.fields = Fields(f"{path}: {_PREFIX[:-1]}", of_vision)
        """The keys of vision, without their prefix."""

    @property
    def kind(self) -> str:
        """The type of the projector."""
        keys = ("clip.projector_type", f"{_PREFIX}projector_type")
        return Fields(str(self.path), dict(self._file.fields)).text(keys)

    @property
    def names(self) -> frozenset[str]:
        """Tensors of pictures. Those of sound are left out."""
        return frozenset(
            name
            for name in self._file.tensors
            if name.startswith(_OF_VISION) and not name.startswith(_OF_SOUND)
        )

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def wrong(self, names: str, found: str, expected: str) -> ModelLoadError:
        """The error for tensors of other sizes than the metadata says."""
        return ModelLoadError(
            f"{self.path}: tensor {names} {found}, expected {expected} from the file's settings; download it again"
        )

    def shape(self, name: str, num_dimensions: int) -> tuple[int, ...]:
        """Shape of a tensor, rows first. ModelLoadError: it is missing or has more or fewer dimensions."""
        shape = self._source.entry(name).shape
        if len(shape) != num_dimensions:
            raise self.wrong(name, f"has shape {list(shape)}", f"{num_dimensions} dimensions")
        return shape

    def size(self, key: str, default: int | None = None, *, maximum: int = 2**20) -> int:
        """A size in the metadata, at least 1."""
        return self.fields.integer(key, default, maximum=maximum)

    @cached_property
    def num_layers(self) -> int:
        """Layers of the vision tower."""
        return self.size("block_count", maximum=len(self._file.tensors))

    def heads(self) -> int:
        """Heads of the vision tower. Their size must be a multiple of 4: halves turn by rows and by columns."""
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        if hidden % (4 * heads):
            raise self.fields.error(
                "attention.head_count", heads, f"heads of a multiple of 4 among {hidden} values"
            )
        return heads

    def numbers(self, key: str, *, above: float) -> list[float]:
        """Three finite numbers above a bound, one for each colour."""
        values = self.fields.data.get(key)
        if (
            not isinstance(values, list)
            or len(values) != 3
            or not all(_is_above(value, above) for value in values)
        ):
            raise self.fields.error(key, values, f"three numbers above {above:g}")
        return [float(str(np.float32(value))) for value in values]

    def read(self, name: str) -> Tensor:
        """A tensor in float32, rows first; quantised ones are dequantised. ModelLoadError: missing or damaged."""
        entry = self._source.entry(name)
        if entry.format in ("f32", "f16", "bf16"):
            return torch.from_numpy(self._source.vector(name, entry.shape))
        matrices = self._source.stack(name, entry.shape)
        values = np.concatenate([ops.dequantise(self._pool, matrix) for matrix in matrices])
        if not np.isfinite(values).all():
            raise ModelLoadError(
                f"{self.path}: tensor {name} holds a NaN or an infinity, expected finite weights; the file is damaged, "
                "download it again"
            )
        return torch.from_numpy(values.reshape(entry.shape))

    @cached_property
    def _source(self) -> GgufSource:
        return GgufSource(self._file, ())

    @cached_property
    def _pool(self) -> ops.ThreadPool:
        return ops.ThreadPool(1)


def _is_above(value: Any, bound: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bound < value < 1e30
