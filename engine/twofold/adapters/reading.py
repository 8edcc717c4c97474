"""Reads a LoRA adapter of any layout: `read_adapter`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from twofold.adapters.adapter import Adapter
from twofold.adapters.base_shapes import BaseShapes
from twofold.adapters.factors import Products
from twofold.adapters.peft_config import CONFIG_FILE, PeftConfig
from twofold.adapters.peft_files import MODEL_FILE, PeftReader, check_directory, open_tensors
from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular

MAX_RANK: Final = 512
"""Largest rank that is read unless the caller says otherwise."""
_PIECE: Final = 1 << 20


def read_adapter(path: str | Path, base: BaseShapes, *, name: str = "", max_rank: int = MAX_RANK) -> Adapter:
    """The adapter in `path`, a directory as PEFT saves it, checked against the base model.

    `name` is the directory's unless given. Raises ModelLoadError, in one line, for a file that is damaged or missing,
    a variant of LoRA that is not computed, a layout that is uncertain, and a tensor that does not fit the base.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelLoadError(f"{path}: is no directory, expected one with {CONFIG_FILE}")
    check_directory(path)
    config, tensors, products = (
        PeftConfig.read(path),
        open_tensors(path / MODEL_FILE),
        Products(base, max_rank),
    )
    replaced = PeftReader(tensors, config, products).read()
    if not products.found and not replaced:
        raise ModelLoadError(
            f"{tensors.file}: holds no tensors, expected factors A and B; save the adapter again"
        )
    digest = _digest((path / CONFIG_FILE, path / MODEL_FILE))
    return Adapter(name or path.name, digest, products.found, replaced, config.base_name)


def _digest(files: Iterable[Path]) -> str:
    """SHA-256 of files: of each one's name and bytes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode())
        try:
            with open_regular(file) as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
