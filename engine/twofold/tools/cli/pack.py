"""`twofold pack`: write a model in its in-memory layout, so that it is memory-mapped instead of loaded."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.api.errors import ConfigError
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.number_options import add_options, cpu_threads_option

if TYPE_CHECKING:
    from twofold.models import LoadProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="directory or GGUF file to pack; with --check a directory that was packed"
    )
    parser.add_argument("output", metavar="out", nargs="?", help="directory to write; it loads as any model")
    parser.add_argument(
        "--check",
        action="store_true",
        help="read a packed model and compare every byte with what was written",
    )
    add_options(parser, [cpu_threads_option()])
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.check == (args.output is not None):
        raise ConfigError("give MODEL and OUT to pack a model, or --check and the directory of a packed one")
    source = Path(args.model).expanduser()
    begun = time.perf_counter()
    report = _check(source) if args.check else _pack(source, Path(args.output).expanduser(), args.cpu_threads)
    report["seconds"] = round(time.perf_counter() - begun, 3)
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['output']}: {report['bytes'] / 1e9:.3f} GB, {report['done']} in {report['seconds']:.1f} s"
        )
    return 0


def _pack(source: Path, output: Path, threads: int) -> dict[str, Any]:
    from twofold.blocks import ops
    from twofold.engine.packing import pack_directory
    from twofold.models import open_model_files
    from twofold.weights.panel_file import PANEL_FILE

    with Bar("packing", "GB", 1e-9) as bar:

        def show(progress: LoadProgress) -> None:
            bar.show(progress.bytes_done, progress.bytes_total)

        written = pack_directory(
            open_model_files(source, "keep"), source, output, ops.ThreadPool(threads), progress=show
        )
    if not written:
        print(f"{output} is complete already", file=sys.stderr)
    size = (output / PANEL_FILE).stat().st_size
    return {"output": str(output), "bytes": size, "done": "packed" if written else "complete"}


def _check(directory: Path) -> dict[str, Any]:
    from twofold.weights.panel_file import PANEL_FILE, check_stretches, read_contents

    path = directory / PANEL_FILE if directory.is_dir() else directory
    with Bar("checking", "GB", 1e-9) as bar:
        check_stretches(path, read_contents(path), bar.show)
    return {"output": str(path), "bytes": path.stat().st_size, "done": "unchanged"}
