"""`twofold merge`: write a model with an adapter merged into it, in any format, and report what the format costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twofold.tools.cli import quantize
from twofold.tools.cli.hub.model_path import model_path

if TYPE_CHECKING:
    from twofold.quantise.rules import Rules

_PLAIN: Final = ("bf16", "f16", "f32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quantize.add_model(parser)
    parser.add_argument("adapter", help="LoRA adapter: directory of PEFT or KTransformers, or GGUF file")
    parser.add_argument("output", metavar="out", help="directory to write; an interrupted run is resumed")
    quantize.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    from twofold.adapters.reading import read_adapter
    from twofold.blocks import ops
    from twofold.models.model_files import open_model_files
    from twofold.quantise.merging import merged_files
    from twofold.step.adapters import shapes_of

    rules = _rules(args)
    source, path, pool = (
        model_path(args.model),
        Path(args.adapter).expanduser(),
        ops.ThreadPool(args.cpu_threads),
    )
    files = open_model_files(source, "keep")
    adapter = read_adapter(path, shapes_of(files), name=path.name)
    return quantize.write(args, merged_files(files, adapter, pool), source, rules, pool, mark=adapter.digest)


def _rules(args: argparse.Namespace) -> Rules:
    """As `twofold quantize`; without a format every matrix is bfloat16."""
    from twofold.quantise.rules import Rule, Rules

    if args.format in (None, *_PLAIN) and args.rules is None:
        plain = args.format or "bf16"
        return Rules(plain, (Rule(plain, blocks=frozenset({"embedding", "head"})),))
    return quantize.rules_of(args)
