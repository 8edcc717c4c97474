"""`twofold lab kv-cache`: quality loss and memory savings of KV cache types with fewer bits.

A text is read with a cache of each type by the serving operators. The next-token probabilities are compared with those
of float32, as `twofold quantize` compares models.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final, get_args

from twofold.blocks import ops
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles
from twofold.quantise.quality import Quality, compare
from twofold.tools.lab.decoded_text import add_text_arguments, read_text_arguments

TYPES: Final[tuple[CacheDType, ...]] = ("bfloat16", "q8", "fp8")


def compare_types(
    files: ModelFiles, sequences: list[list[int]], pool: ops.ThreadPool
) -> dict[CacheDType, Quality]:
    """Quality of each type against float32. Reads the model twice per type, one layer in memory at a time."""
    return {dtype: compare(files, files, sequences, pool, cache_dtypes=("float32", dtype)) for dtype in TYPES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, max_tokens=2048, sequence_tokens=2048)


def run(args: argparse.Namespace) -> int:
    path, files, sequences, pool = read_text_arguments(args)
    found = compare_types(files, sequences, pool)
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
