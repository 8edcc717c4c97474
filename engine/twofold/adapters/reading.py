"""Reads a LoRA adapter of any layout: `read_adapter`."""

from __future__ import annotations

import contextlib
import hashlib
import math
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
from twofold.api.adapter_config import AdapterConfig
from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.weights.checkpoint import read_header
from twofold.weights.gguf_file import SUFFIX, is_gguf

MAX_RANK: Final = 512
"""Largest rank that is read unless the caller says otherwise."""
_PIECE: Final = 1 << 20
_SUFFIXES: Final = (".safetensors", ".gguf")


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


def reserved_bytes(config: AdapterConfig, *, as_f32: bool = False) -> int:
    """Memory that the adapters to be loaded will take: the sizes of their files, of the largest if not all may stay.

    as_f32: the most that it can be, which is more for files of 16 bits: values that bfloat16 lacks are kept in float32.
    """
    sizes = [
        sum(_file_bytes(file, as_f32) for file in [path, *path.glob("*")] if file.is_file())
        for path, _ in config.adapters.values()
    ]
    return sum(sorted(sizes)[-config.max_cpu_loras :])


def _file_bytes(file: Path, as_f32: bool) -> int:
    if file.suffix not in _SUFFIXES:
        return 0
    if as_f32 and file.suffix == SUFFIX:
        return 2 * file.stat().st_size
    if as_f32:
        with contextlib.suppress(ModelLoadError):  # loading will refuse it
            return sum(4 * math.prod(entry.shape) for entry in read_header(file).values())
    return file.stat().st_size
