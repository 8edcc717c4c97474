"""`twofold models`: lists supported families and formats, and the memory of models on disk. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.pooling import PoolerConfig
from twofold.models.layer_description import describe_layers, example_config
from twofold.models.model_files import open_model_files
from twofold.models.pooling import read_pooling
from twofold.models.registry import FAMILIES, Family, describe_family, family_named
from twofold.tools.cli.doctor.memory_table import ContextNeeds, memory_table
from twofold.tools.cli.hub.model_path import MODEL_NAME_HELP, model_path
from twofold.weights import gguf_nvfp4
from twofold.weights.gguf_file import is_gguf
from twofold.weights.weight_format import FORMATS, distinct_formats

_MAX_RESULTS: Final = 200
_GIB: Final = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="family, to print the parts of its layers in order (shapes, state, cost), or "
        f"model, or directory that holds models, {MODEL_NAME_HELP} (default: list what is supported)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0; 2 if a path holds no model or one of them cannot be used."""
    if not args.paths:
        print(json.dumps(known()) if args.json else "\n".join(_known_lines()))
        return 0
    families = [family for path in args.paths if (family := family_named(path)) and not Path(path).exists()]
    if len(families) == len(args.paths):
        described = {family.module: list(_layer_lines(family)) for family in families}
        print(json.dumps(described) if args.json else "\n".join(chain.from_iterable(described.values())))
        return 0
    entries = [_examine(model) for path in args.paths for model in find_models(model_path(path))]
    if args.json:
        print(json.dumps({"models": entries}))
    else:
        print("\n".join(_entry_lines(entries)))
    return 2 if any("error" in entry for entry in entries) else 0


def _layer_lines(family: Family) -> Iterator[str]:
    """The family's layers, in the sizes of transformers' default configuration."""
    yield f"{family.module}: {describe_family(family)}"
    yield from describe_layers(example_config(family))


def known() -> dict[str, Any]:
    """Families and formats, as in --json."""
    gguf_types = sorted({layout.gguf for layout in FORMATS.values() if layout.gguf} | {gguf_nvfp4.TYPE})
    return {
        "families": [
            {"models": describe_family(family), "classes": family.classes, "gguf": family.gguf}
            for family in FAMILIES
        ],
        "formats": {"computed": list(FORMATS), "gguf": gguf_types},
    }


def find_models(path: Path) -> Iterator[Path]:
    """The models at `path`, or in it down to two levels of directories. Raises ConfigError for none."""
    if is_gguf(path) or (path / "config.json").is_file():
        yield path
        return
    if not path.is_dir():
        raise ConfigError(f"{path}: no model; give a model's directory, a GGUF file, or a directory of these")
    patterns = ("*.gguf", "*/*.gguf", "*/*/*.gguf", "*/config.json", "*/*/config.json")
    files = sorted(file for pattern in patterns for file in path.glob(pattern))
    # The first file of a model in several files.
    firsts = [file for file in files if "-of-" not in file.stem or "-00001-of-" in file.stem]
    found = [file.parent if file.name == "config.json" else file for file in firsts]
    if not found:
        raise ConfigError(f"{path}: holds no model; expected directories with a config.json, or GGUF files")
    if len(found) > _MAX_RESULTS:
        raise ConfigError(f"{path}: holds {len(found)} models, expected at most {_MAX_RESULTS}; name fewer")
    yield from found


def _examine(path: Path) -> dict[str, Any]:
    try:
        files = open_model_files(path)
        rows = memory_table(files, EngineConfig(model=str(path)))
        pooling = read_pooling(path, files, PoolerConfig())
    except ModelLoadError as error:
        return {"path": str(path), "error": " ".join(str(error).split())}
    return {
        "path": str(path),
        "architecture": files.config.architecture,
        "layers": files.config.num_layers,
        "experts_per_layer": files.config.routed.num_experts,
        "expert_formats": sorted(
            set().union(*chain.from_iterable(map(distinct_formats, files.expert_formats())))
        ),
        "embeddings": pooling.describe(),
        "file_bytes": files.file_bytes,
        "contexts": [dataclasses.asdict(row) for row in rows],
        "largest_context_here": max((row.tokens for row in rows if row.fits), default=0),
    }


def _known_lines() -> Iterator[str]:
    known_models = known()
    yield "Families (Hugging Face class; GGUF architecture):"
    for family in known_models["families"]:
        yield f"  {family['models']}"
        yield f"      {', '.join(family['classes'])}; {family['gguf']}"
    formats = known_models["formats"]
    yield f"Weight formats computed without conversion: {', '.join(formats['computed'])}"
    yield f"Tensor types of GGUF: {', '.join(formats['gguf'])}"
    yield "Layers of a family, part by part: twofold models FAMILY, e.g. twofold models qwen3_moe"
    yield "Memory of a model: twofold models PATH; memory by context length: twofold doctor MODEL"


def _entry_lines(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        if "error" in entry:
            yield f"BAD  {entry['error']}"
            continue
        rows = [ContextNeeds(**row) for row in entry["contexts"]]
        least, most = rows[0], rows[-1]
        here = entry["largest_context_here"]
        yield f"{'ok  ' if here else 'big '} {entry['path']}"
        experts = "without experts"
        if entry["experts_per_layer"]:
            experts = f"of {entry['experts_per_layer']} experts in {', '.join(entry['expert_formats'])}"
        yield (
            f"     {entry['architecture']}, {entry['layers']} layers {experts}, "
            f"{entry['file_bytes'] / _GIB:.2f} GiB on disk; memory "
            f"{least.host_bytes / _GIB:.2f} GiB for {least.tokens} tokens, {most.host_bytes / _GIB:.2f} GiB for "
            f"{most.tokens}: " + (f"fits here up to {here}" if here else "does not fit here")
        )
        yield f"     embeddings: {entry['embeddings']}"
