"""`twofold convert`: write a LoRA adapter of any layout as PEFT or llama.cpp reads it."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from twofold.api.errors import ConfigError
from twofold.tools.cli.hub.model_path import MODEL_NAME_HELP, model_path

if TYPE_CHECKING:
    from twofold.adapters.adapter import Adapter
    from twofold.adapters.base_shapes import BaseShapes
    from twofold.models.model_files import ModelFiles

_FORMATS: Final = ("peft", "gguf")
_SUFFIX: Final = ".gguf"
_LARGEST_ERROR: Final = 1e-5
"""Largest rounding error of a product, relative to its largest value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"the adapter's base: directory or GGUF file, {MODEL_NAME_HELP}")
    parser.add_argument(
        "adapter", help="LoRA adapter: directory of PEFT, SGLang or KTransformers, or GGUF file"
    )
    parser.add_argument("output", metavar="out", help="what to write: a directory (peft) or a file (gguf)")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help="peft: adapter_config.json and safetensors; gguf: llama.cpp's (default: by the ending of out)",
    )


def run(args: argparse.Namespace) -> int:
    from twofold.adapters.reading import read_adapter
    from twofold.models.model_files import open_model_files
    from twofold.step.adapters import shapes_of

    path, out = Path(args.adapter).expanduser(), Path(args.output).expanduser()
    form = args.format or ("gguf" if out.suffix == _SUFFIX else "peft")
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; give another name")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.absolute().parent} does not exist; make it first")
    model = model_path(args.model)
    files = open_model_files(model)
    base = shapes_of(files)
    adapter = read_adapter(path, base)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as folder:
        part = Path(folder) / out.name
        _write(adapter, base, files, part=part, form=form, model=model)
        _check(adapter, read_adapter(part, base), path)
        os.replace(part, out)
    print(
        f"{out}: {len(adapter.products):,} matrices, rank at most {adapter.max_rank}, {_bytes(out) / 1e6:,.1f} MB"
    )
    return 0


def _write(
    adapter: Adapter, base: BaseShapes, files: ModelFiles, *, part: Path, form: str, model: Path
) -> None:
    from twofold.adapters.gguf_writing import write_gguf
    from twofold.adapters.peft_writing import write_peft
    from twofold.models.registry import family_named

    if form == "gguf":
        family = family_named(files.config.architecture)
        name = base.architecture or (family.gguf if family is not None else "")
        if not name:
            raise ConfigError(f"llama.cpp has no name for {files.config.architecture}; write it as peft")
        write_gguf(adapter, base, part, architecture=name)
        return
    part.mkdir()
    write_peft(adapter, base, part, base_path=str(model.resolve()))


def _check(before: Adapter, after: Adapter, path: Path) -> None:
    """Raises ConfigError unless both make the same changes: a form may be ambiguous for a model."""
    same = before.products.keys() == after.products.keys() and all(
        np.array_equal(whole, after.replaced.get(key, whole[:0])) for key, whole in before.replaced.items()
    )
    for key, product in before.products.items() if same else ():
        other = after.products[key]
        row = product.b[:1] @ product.a, other.b[:1] @ other.a
        column = product.b @ product.a[:, :1], other.b @ other.a[:, :1]
        for one, found in (row, column):
            same = same and bool(np.abs(one - found).max() <= _LARGEST_ERROR * max(np.abs(one).max(), 1e-30))
    if not same:
        raise ConfigError(
            f"{path}: the other form does not hold the same changes of this model; serve it as it is"
        )


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files)
