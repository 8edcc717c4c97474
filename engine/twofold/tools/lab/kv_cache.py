"""`twofold lab kv-cache`: quality loss and memory savings of KV cache types with fewer bits.

A text is read with a cache of each type by the serving operators. The next-token probabilities are compared with those
of float32, as `twofold quantize` compares models.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final, get_args

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.models.bundled import bundled_model_path
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.quantise.quality import Quality, compare
from twofold.quantise.texts import read_text, token_sequences

TYPES: Final[tuple[CacheDType, ...]] = ("bfloat16", "q8", "fp8")


def compare_types(
    files: ModelFiles, sequences: list[list[int]], pool: ops.ThreadPool
) -> dict[CacheDType, Quality]:
    """Quality of each type against float32. Reads the model twice per type, one layer in memory at a time."""
    return {dtype: compare(files, files, sequences, pool, cache_dtypes=("float32", dtype)) for dtype in TYPES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="", help="directory or GGUF file (default: the bundled model)"
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to read (default: a tale in English)")
    parser.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N", help="tokens of the text (default: 2048)"
    )
    parser.add_argument(
        "--sequence-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens read as one sequence (default: 2048, or the model's context)",
    )
    parser.add_argument(
        "--cpu-threads", type=int, default=0, metavar="N", help="0: one per physical core (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--max-tokens", args.max_tokens), ("--sequence-tokens", args.sequence_tokens)):
        if value < 2:
            raise ConfigError(f"{flag} was given {value}; it takes 2 or more")
    threads = EngineConfig(cpu_threads=args.cpu_threads).cpu_threads
    text = read_text(args.text)
    path = Path(args.model).expanduser() if args.model else bundled_model_path()
    files = open_model_files(path)
    sequences = token_sequences(path, files, text, args.max_tokens, args.sequence_tokens)
    found = compare_types(files, sequences, ops.ThreadPool(threads))
    num_bytes = {dtype: files.config.cache_bytes_per_token(dtype) for dtype in get_args(CacheDType)}
    if args.json:
        report: dict[str, Any] = {
            "model": str(path),
            "bytes_per_token": num_bytes,
            "quality": {dtype: quality.as_json() for dtype, quality in found.items()},
        }
        print(json.dumps(report))
        return 0
    print(f"{path}: {sum(map(len, sequences))} tokens, float32 keeps {num_bytes['float32']:,} bytes of each")
    print("  type       bytes/token   KL mean     99 %    largest   same token   perplexity")
    for dtype, quality in found.items():
        print(
            f"  {dtype:<9} {num_bytes[dtype]:>12,} {quality.mean_kl:>9.5f} {quality.p99_kl:>8.4f} "
            f"{quality.max_kl:>10.4f} {100 * quality.same_top:>10.1f} %   {quality.source_perplexity:.3f} → "
            f"{quality.perplexity:.3f}"
        )
    return 0
