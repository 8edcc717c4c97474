"""`twofold quantize`: write a model again with smaller weights, and say what that cost in quality."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.cli.bar import Bar

if TYPE_CHECKING:
    from twofold.blocks.ops import ThreadPool
    from twofold.models.model_files import ModelFiles
    from twofold.models.quantise.quality import Quality
    from twofold.models.quantise.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="directory or GGUF file to quantise (BF16, F16, F32, FP8, or any other)"
    )
    parser.add_argument(
        "output", metavar="out", help="directory to write; an interrupted run is taken up again"
    )
    parser.add_argument(
        "--format",
        required=True,
        metavar="FORMAT",
        help="int8, int8_channel, int4, int4_channel, q8_0, q4_0, q4_k, q5_k or q6_k",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text on which both models are compared (default: a tale in English)",
    )
    parser.add_argument(
        "--max-tokens",
        default="2048",
        metavar="N",
        help="tokens of the text to compare on; 0: do not compare (default: 2048)",
    )
    parser.add_argument(
        "--cpu-threads",
        default="0",
        metavar="N",
        help="threads to use; 0: one per physical core (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from twofold.blocks import ops
    from twofold.models.model_files import open_model_files
    from twofold.models.quantise.recipe import TARGETS, make_recipe
    from twofold.models.quantise.texts import read_text, token_sequences

    if args.format not in TARGETS:
        raise ConfigError(f"--format was given {args.format!r}; it takes {', '.join(TARGETS)}")
    max_tokens = _whole_number("--max-tokens", args.max_tokens, 2**31 - 1)
    threads = EngineConfig(cpu_threads=_whole_number("--cpu-threads", args.cpu_threads, 1024)).cpu_threads
    text = read_text(args.text) if max_tokens else ""
    source, output = Path(args.model).expanduser(), Path(args.output).expanduser()
    files = open_model_files(source)
    sequences = token_sequences(source, files, text, max_tokens) if max_tokens else []
    pool = ops.ThreadPool(threads)
    recipe = make_recipe(files, args.format, pool)
    _write(files, recipe, source, output, args.format)
    quality = _compare(files, output, sequences, pool) if sequences else None
    if args.json:
        print(json.dumps(_report(files, recipe, source, output, args.format, quality)))
    else:
        print(_summary(files, recipe, output, args.format, quality))
    return 0


def _write(files: ModelFiles, recipe: Recipe, source: Path, output: Path, target: str) -> None:
    from twofold.models.quantise.directory import OutputDirectory, fingerprint
    from twofold.models.quantise.origin import source_config, write_tokenizer

    config = source_config(source, files.config)
    directory = OutputDirectory(output, recipe, source, fingerprint(files, target))
    if directory.begin():
        print(f"{output} is complete already", file=sys.stderr)
        return
    bar = Bar(f"quantising to {target}", "GB", 1e-9)
    try:
        kept = directory.write(bar.show)
    finally:
        bar.clear()
    if kept:
        print(f"taken up again: {kept} of {len(recipe.files)} files were there", file=sys.stderr)
    directory.finish(config, lambda: write_tokenizer(source, output, files.config))


def _compare(files: ModelFiles, output: Path, sequences: list[list[int]], pool: ThreadPool) -> Quality:
    from twofold.models.model_files import open_model_files
    from twofold.models.quantise.quality import compare

    bar = Bar("comparing", "layers", 1.0)
    try:
        return compare(files, open_model_files(output), sequences, pool, bar.show)
    finally:
        bar.clear()


def _whole_number(flag: str, text: str, highest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= highest:
        raise ConfigError(f"{flag} was given {text!r}; it takes a whole number from 0 to {highest}")
    return value


def _report(
    files: ModelFiles, recipe: Recipe, source: Path, output: Path, target: str, quality: Quality | None
) -> dict[str, Any]:
    return {
        "model": str(source),
        "output": str(output),
        "format": target,
        "source_bytes": _source_bytes(files),
        "bytes": sum(tensor.num_bytes for tensor in recipe.tensors()),
        "tensors_by_format": _by_format(recipe),
        "quality": None if quality is None else quality.as_json(),
    }


def _summary(files: ModelFiles, recipe: Recipe, output: Path, target: str, quality: Quality | None) -> str:
    written = sum(tensor.num_bytes for tensor in recipe.tensors())
    counts = ", ".join(f"{count} {name}" for name, count in _by_format(recipe).items())
    lines = [
        f"{output}: {target}, {written / 1e9:.3f} GB of weights, "
        f"{100 * written / _source_bytes(files):.1f} % of the source (tensors: {counts})"
    ]
    if quality is None:
        lines.append("not compared with the source (--max-tokens 0)")
    else:
        lines += [
            f"  compared on {quality.num_tokens} tokens with the source:",
            f"    KL divergence     mean {quality.mean_kl:.5f}, 99th percentile {quality.p99_kl:.4f}, largest "
            f"{quality.max_kl:.4f} nats",
            f"    likeliest token   the same for {100 * quality.same_top:.1f} %",
            f"    perplexity        {quality.source_perplexity:.3f} → {quality.perplexity:.3f}",
            f"  {quality.verdict}",
        ]
    return "\n".join(lines)


def _source_bytes(files: ModelFiles) -> int:
    return sum(files.tensors.entry(name).num_bytes for name in files.tensors)


def _by_format(recipe: Recipe) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in recipe.tensors():
        counts[tensor.format] = counts.get(tensor.format, 0) + 1
    return dict(sorted(counts.items()))
