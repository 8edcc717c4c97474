"""`twofold rm`: delete models from the cache of a hub."""

from __future__ import annotations

import argparse
import sys

from twofold.api.errors import ConfigError
from twofold.hub.cache import CachedModel, cache_dir, cached_models, remove
from twofold.hub.reference import EXPECTED, parse_hub_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="ORG/REPO[:QUANT][@COMMIT] as `twofold list` shows it; without QUANT and COMMIT every one of ORG/REPO",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """0; 1 if the question was answered with no."""
    found = list(dict.fromkeys(model for name in args.models for model in _named(name)))
    for model in found:
        print(f"{model.name}  {model.num_bytes / 1e9:.2f} GB  {model.path}", file=sys.stderr)
    if not args.yes and not _confirmed(len(found)):
        return 1
    freed = sum(remove(model) for model in found)
    print(f"deleted {len(found)} of {len(found)}, {freed / 1e9:.2f} GB freed")
    return 0


def _named(name: str) -> list[CachedModel]:
    wanted = parse_hub_name(f"hf:{name.removeprefix('hf:')}")
    if wanted is None:
        raise ConfigError(f"{name!r} was given; expected {EXPECTED}")
    found = [
        model
        for model in cached_models()
        if model.folder.repo == wanted.repo
        and (wanted.quant is None or model.variant.quant.upper() == wanted.quant.upper())
        and (wanted.revision == "main" or model.commit.startswith(wanted.revision))
    ]
    if not found:
        raise ConfigError(f"{name}: no such model in {cache_dir()}; `twofold list` shows what there is")
    return found


def _confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("rm asks before it deletes, and standard input is no terminal; give --yes")
    return input(f"delete {count} model{'s' if count != 1 else ''}? [y/N] ").strip().lower() in ("y", "yes")
