"""`twofold quantize`: write a model with smaller weights, and report the loss of quality."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.api.errors import ConfigError
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.hub.model_path import MODEL_NAME_HELP, model_path
from twofold.tools.cli.number_options import add_options, cpu_threads_option, whole

if TYPE_CHECKING:
    from twofold.blocks.ops import ThreadPool
    from twofold.models.model_files import ModelFiles
    from twofold.quantise.quality import Quality
    from twofold.quantise.recipe import Recipe
    from twofold.quantise.rules import Rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("output", metavar="out", help="directory to write; an interrupted run is resumed")
    add_settings(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help=f"directory or GGUF file to quantise (BF16, F16, F32, FP8, or any other), {MODEL_NAME_HELP}",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """How to write, and on what to compare."""
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="format of all matrices: int8, int8_channel, int4, int4_channel, mxfp4, q8_0, q4_0, q4_k, q5_k or q6_k",
    )
    parser.add_argument(
        "--rules",
        metavar="FILE",
        help="YAML file with the format of blocks, layers and tensors (docs/guides/quantise.md)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text on which both models are compared (default: a tale in English)",
    )
    compared = "tokens of the text on which the models are compared; 0: do not compare"
    add_options(parser, [("--max-tokens", "N", whole(0, 2**31 - 1), 2048, compared), cpu_threads_option()])
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from twofold.blocks import ops
    from twofold.models.model_files import open_model_files

    source, pool = model_path(args.model), ops.ThreadPool(args.cpu_threads)
    return write(args, open_model_files(source, "keep"), source, rules_of(args), pool)


def write(
    args: argparse.Namespace, files: ModelFiles, source: Path, rules: Rules, pool: ThreadPool, mark: str = ""
) -> int:
    """Write `files` of the model at `source` by `rules`, compare and report. mark: what else the output depends on."""
    from twofold.quantise.recipe import make_recipe
    from twofold.quantise.texts import read_text, token_sequences

    text = read_text(args.text) if args.max_tokens else ""
    output = Path(args.output).expanduser()
    # A classifier has no next tokens to compare.
    compares = args.max_tokens and not files.config.head.labels
    sequences = token_sequences(source, files, text, args.max_tokens) if compares else []
    job = _Job(files, make_recipe(files, rules, pool), rules, source=source, output=output, mark=mark)
    job.write()
    quality = _compare(files, output, sequences, pool) if sequences else None
    print(json.dumps(job.report(quality)) if args.json else job.summary(quality))
    return 0


@dataclass(frozen=True)
class _Job:
    """A model, and what it is quantised to."""

    files: ModelFiles
    recipe: Recipe
    rules: Rules
    source: Path
    output: Path
    mark: str

    def write(self) -> None:
        from twofold.models.derived_model import fingerprint, source_config, write_tokenizer
        from twofold.quantise.directory import OutputDirectory

        source, output, model = self.source, self.output, self.files.config
        config = source_config(source, model)
        directory = OutputDirectory(
            output, self.recipe, source, fingerprint(self.files, f"{self.rules}{self.mark}")
        )
        if directory.begin():
            print(f"{output} is complete already", file=sys.stderr)
            return
        with Bar(f"quantising to {self.rules.label}", "GB", 1e-9) as bar:
            kept = directory.write(bar.show)
        if kept:
            print(f"resumed: {kept} of {len(self.recipe.files)} files were complete", file=sys.stderr)
        directory.finish(config, lambda: write_tokenizer(source, output, model))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.recipe.tensors())

    @property
    def by_format(self) -> dict[str, int]:
        """Number of tensors by format."""
        return dict(sorted(Counter(tensor.format for tensor in self.recipe.tensors()).items()))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Bytes by format of each layer, and of the tensors outside the layers."""
        found = []
        for number, tensors in enumerate(self.recipe.files):
            by_format = Counter[str]()
            for tensor in tensors:
                by_format[tensor.format] += tensor.num_bytes
            layer = number if number < self.files.config.num_layers else None
            found.append({"layer": layer, "bytes": by_format.total(), "bytes_by_format": by_format})
        return found

    def report(self, quality: Quality | None) -> dict[str, Any]:
        return {
            "model": str(self.source),
            "output": str(self.output),
            "format": self.rules.label,
            "source_bytes": self.files.file_bytes,
            "bytes": self.num_bytes,
            "tensors_by_format": self.by_format,
            "layers": self.layers,
            "quality": None if quality is None else quality.as_json(),
        }

    def summary(self, quality: Quality | None) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.by_format.items())
        lines = [
            f"{self.output}: {self.rules.label}, {self.num_bytes / 1e9:.3f} GB of weights, "
            f"{100 * self.num_bytes / self.files.file_bytes:.1f} % of the source (tensors: {counts})"
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
            ]
        lines += _layer_table(self.layers, quality)
        if quality is not None:
            lines.append(f"  {quality.verdict}")
        return "\n".join(lines)


def rules_of(args: argparse.Namespace) -> Rules:
    from twofold.quantise.recipe import TARGETS
    from twofold.quantise.rules import Rules, read_rules

    if (args.format is None) == (args.rules is None):
        raise ConfigError("either --format or --rules is needed, and not both; see docs/guides/quantise.md")
    if args.rules is not None:
        return read_rules(Path(args.rules).expanduser())
    if args.format not in TARGETS:
        raise ConfigError(f"--format was given {args.format!r}; it takes {', '.join(TARGETS)}")
    return Rules(args.format)


def _compare(files: ModelFiles, output: Path, sequences: list[list[int]], pool: ThreadPool) -> Quality:
    from twofold.models.model_files import open_model_files
    from twofold.quantise.quality import compare

    with Bar("comparing", "layers", 1.0) as bar:
        return compare(files, open_model_files(output), sequences, pool, progress=bar.show)


def _layer_table(layers: list[dict[str, Any]], quality: Quality | None) -> list[str]:
    """Table lines; adjacent layers of the same formats share one, with the drift of the last of them."""
    rows: list[tuple[int, int, str, str]] = []
    compared = () if quality is None else quality.drift
    for entry in layers:
        if entry["layer"] is None:
            continue
        shares = ", ".join(
            f"{format} {100 * size / entry['bytes']:.0f} %"
            for format, size in entry["bytes_by_format"].items()
        )
        first = entry["layer"]
        is_compared = first < len(compared)  # an MTP layer comes last and has no part in it
        if rows and rows[-1][3] == shares and (is_compared or quality is None):
            first = rows.pop()[0]
        drift = f"{100 * compared[entry['layer']]:.2f} %" if is_compared else "not compared"
        rows.append((first, entry["layer"], drift, shares))
    drifts = "" if quality is None else "   drift of hidden states from the source's"
    return [f"  layers     bytes by format{drifts}"] + [
        f"  {f'{first}-{last}':<9}  {shares}" + ("" if quality is None else f"   {drift}")
        for first, last, drift, shares in rows
    ]
