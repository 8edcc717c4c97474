"""`twofold version`: installed versions, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform

from twofold import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    versions = {
        "twofold": __version__,
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "native": _native_isa(),
        "platform": platform.platform(),
    }
    if args.json:
        print(json.dumps(versions))
    else:
        for name, value in versions.items():
            print(f"{name:<9} {value if value is not None else 'not installed'}")
    return 0


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native_isa() -> str | None:
    """The instruction set that the native kernels selected; None if they are not built."""
    try:
        from twofold.blocks import ops
    except ImportError:
        return None
    return ops.isa_choice()[0]
