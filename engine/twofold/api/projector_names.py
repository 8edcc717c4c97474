"""Names of projector files, which hold the picture encoder of a model in GGUF format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_PREFERRED: Final = ("bf16", "f32", "f16", "fp16", "q8_0")
_PROJECTOR: Final = re.compile(r"(?:.*[-._])?mmproj(?:[-._].*)?\.gguf", re.IGNORECASE)


def is_projector(name: str) -> bool:
    """Whether a file's name, without its folder, is that of a projector."""
    return _PROJECTOR.fullmatch(name) is not None


def preferred_projector(names: Iterable[str]) -> str | None:
    """The projector to use: BF16, which publishers' checkpoints have, before F32, F16, Q8_0 and other types, the first
    by name among equals. None: there is none."""
    return min(filter(is_projector, names), key=_rank, default=None)


def _rank(name: str) -> tuple[int, str]:
    parts = re.split(r"[-.]", name.lower())
    return next((n for n, kind in enumerate(_PREFERRED) if kind in parts), len(_PREFERRED)), name
