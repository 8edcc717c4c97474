"""`twofold list`: the complete models in the cache of a hub."""

from __future__ import annotations

import argparse
import json
from typing import Any

from twofold.hub.cache import cache_dir, cached_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = [
        {
            "name": str(model.name),
            "quant": model.variant.quant,
            "bytes": model.num_bytes,
            "revision": model.commit,
            "path": str(model.path),
        }
        for model in cached_models()
    ]
    if args.json:
        print(json.dumps({"models": rows}))
        return 0
    if not rows:
        print(f"no models in {cache_dir()}; twofold pull ORG/REPO downloads one")
        return 0
    width = max(4, *(len(row["name"]) for row in rows))
    print(f"{'name':<{width}}  {'quant':<11} {'size':>9}  {'revision':<12}  path")
    for row in rows:
        size = f"{row['bytes'] / 1e9:.2f} GB"
        print(f"{row['name']:<{width}}  {row['quant']:<11} {size:>9}  {row['revision'][:12]}  {row['path']}")
    return 0
