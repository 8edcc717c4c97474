"""`twofold telemetry prune`: deletes whole runs by number, age or size."""

from __future__ import annotations

import argparse
import re
from typing import Final

_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `twofold telemetry prune`."""
    parser.add_argument(
        "--run", type=int, action="append", default=[], metavar="ID", help="delete this run; may be repeated"
    )
    parser.add_argument(
        "--older-than", metavar="AGE", help="delete runs that ended longer ago: 90m, 12h, 7d or 4w"
    )
    parser.add_argument(
        "--max-size", metavar="SIZE", help="delete the oldest runs until the file has at most SIZE: 500M, 2G"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted and change nothing"
    )


def run(args: argparse.Namespace, url: str) -> int:
    """Delete in one transaction: an interruption leaves the database as it was."""
    from twofold.api.errors import ConfigError
    from twofold.telemetry.prune import prune
    from twofold.tools.cli.bar import Bar

    if not (args.run or args.older_than or args.max_size):
        raise ConfigError("nothing to delete; give --run ID, --older-than AGE or --max-size SIZE")
    older_than_s = None if args.older_than is None else _quantity(args.older_than, _SECONDS, "--older-than")
    max_bytes = None if args.max_size is None else _quantity(args.max_size, _BYTES, "--max-size")
    with Bar("deleting", "tables", 1) as bar:
        pruned = prune(
            url,
            run_ids=args.run,
            older_than_s=older_than_s,
            max_bytes=max_bytes,
            dry_run=args.dry_run,
            progress=bar.show,
        )
    verb = "would delete" if args.dry_run else "deleted"
    for each in pruned.runs:
        print(f"{verb} run {each.run_id}: {each.model}, {each.num_rows:,} rows")
    print(
        f"{verb} {len(pruned.runs)} runs; the file {'would have' if args.dry_run else 'has'} "
        f"{pruned.bytes_after / 1e6:,.1f} MB of {pruned.bytes_before / 1e6:,.1f} MB"
    )
    return 0


def _quantity(text: str, units: dict[str, int], flag: str) -> int:
    """A whole number with one of the units."""
    from twofold.api.errors import ConfigError

    match = re.fullmatch(r"(\d{1,9})([A-Za-z]?)", text.strip())
    unit = match.group(2) if match else None
    scale = next((units[each] for each in (unit, (unit or "").upper()) if each in units), None)
    if match is None or scale is None:
        choices = ", ".join(each or "none" for each in units)
        raise ConfigError(f"{flag} is {text!r}; expected a whole number and a unit ({choices})")
    return int(match.group(1)) * scale
