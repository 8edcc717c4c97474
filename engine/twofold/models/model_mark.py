"""A short name for a model's contents, equal on every machine that holds the same files."""

from __future__ import annotations

import hashlib
from typing import Final

from twofold.models.model_files import ModelFiles

_NUM_READ: Final = 256
"""Tensors whose first bytes are read, spread evenly: enough to tell two trainings of one architecture apart."""
_NUM_BYTES: Final = 64


def model_mark(files: ModelFiles) -> str:
    """12 hexadecimal digits of names, types and shapes of all tensors and the first bytes of 256 of them."""
    digest = hashlib.sha256()
    names = sorted(files.tensors)
    read = set(names[:: max(1, len(names) // _NUM_READ)])
    for name in names:
        entry = files.tensors.entry(name)
        digest.update(f"{name} {entry.dtype} {entry.shape} {entry.num_bytes}\n".encode())
        if name in read:
            with entry.file.open("rb") as file:
                file.seek(entry.offset)
                digest.update(file.read(min(_NUM_BYTES, entry.num_bytes)))
    return digest.hexdigest()[:12]
