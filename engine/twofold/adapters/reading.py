"""Reads a LoRA adapter of any layout: `read_adapter`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from twofold.adapters.adapter import F32, Adapter
from twofold.adapters.base_shapes import BaseShapes
from twofold.adapters.factors import Products
from twofold.adapters.gguf_adapters import GgufAdapter
from twofold.adapters.ktransformers import FUSED_FILE, MANIFEST_FILE, read_fused_experts
from twofold.adapters.peft_config import CONFIG_FILE, read_settings
from twofold.adapters.peft_files import MODEL_FILE, PeftReader, check_directory, open_tensors
from twofold.adapters.settings import AdapterSettings
from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.weights.gguf_file import SUFFIX, is_gguf

MAX_RANK: Final = 512
"""Largest rank that is read unless the caller says otherwise."""
_PIECE: Final = 1 << 20


def read_adapter(path: str | Path, base: BaseShapes, *, name: str = "", max_rank: int = MAX_RANK) -> Adapter:
    """The adapter in `path`, checked against the base model: a directory as PEFT or KTransformers saves it, or a GGUF
    file.

    `name` is that of the directory or file unless given. Raises ModelLoadError, in one line, for a file that is damaged
    or missing, a variant of LoRA that is not computed, a layout that is uncertain, and a tensor that does not fit the
    base.
    """
    path = Path(path)
    products = Products(base, max_rank)
    replaced: dict[str, F32] = {}
    if is_gguf(path):
        adapter = GgufAdapter.open(path, base.architecture)
        adapter.read(products)
        settings, files = adapter.settings, adapter.files
    elif path.is_dir():
        replaced, settings, files = _read_directory(path, products)
    else:
        raise ModelLoadError(f"{path}: expected a directory with {CONFIG_FILE}, or a GGUF file")
    if not products.found and not replaced:
        raise ModelLoadError(f"{path}: holds no tensors, expected factors A and B; save the adapter again")
    return Adapter(
        name or path.name.removesuffix(SUFFIX), _digest(files), products.found, replaced, settings.base_name
    )


def _read_directory(
    path: Path, products: Products
) -> tuple[dict[str, F32], AdapterSettings, tuple[Path, ...]]:
    """Add a directory's products; returns whole matrices, settings, and the files read."""
    fused, weights = path / FUSED_FILE, path / MODEL_FILE
    check_directory(path, required=not fused.exists())
    settings = read_settings(path)
    replaced: dict[str, F32] = {}
    if weights.exists():
        replaced = PeftReader(open_tensors(weights), settings, products).read()
    if fused.exists():
        read_fused_experts(open_tensors(fused), settings, products)
    named = (path / CONFIG_FILE, weights, fused, path / MANIFEST_FILE)
    return replaced, settings, tuple(file for file in named if file.exists())


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
