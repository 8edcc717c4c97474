"""`twofold telemetry export`: a run as a Perfetto trace, Parquet files or CSV files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_TRACE_S: Final = 60.0
"""Length of a trace for which no range was given: a viewer opens some hundred megabytes at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `twofold telemetry export`."""
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write steps, layers, CPU, GPU, PCIe lanes and requests as trace events for https://ui.perfetto.dev "
        f"(default range: the run's last {_TRACE_S:.0f} s)",
    )
    parser.add_argument("--parquet", metavar="DIR", help="write DIR/TABLE.parquet (needs twofold[parquet])")
    parser.add_argument("--csv", metavar="DIR", help="write DIR/TABLE.csv")
    parser.add_argument("--run", type=int, metavar="ID", help="run to export (default: the last one)")
    moment = "seconds since the run's start, or an ISO 8601 time"
    parser.add_argument("--from", dest="begin", metavar="TIME", help=f"begin of the range: {moment}")
    parser.add_argument("--to", dest="end", metavar="TIME", help=f"end of the range: {moment}")
    parser.add_argument("--window", type=float, metavar="SECONDS", help="export the run's last SECONDS")


def run(args: argparse.Namespace, url: str) -> int:
    """Write what was asked for, and say what it holds."""
    from twofold.api.errors import ConfigError
    from twofold.telemetry import queries
    from twofold.telemetry.exports import export_window

    if not (args.perfetto or args.parquet or args.csv):
        raise ConfigError("nothing to write; give --perfetto FILE, --parquet DIR or --csv DIR")
    targets = {flag: Path(value) for flag in ("perfetto", "parquet", "csv") if (value := vars(args)[flag])}
    for flag, path in targets.items():
        _check_target(flag, path)
    db = queries.open_database(url)
    chosen = queries.find_run(db, args.run)
    try:
        for flag, path in targets.items():
            whole = args.begin is None and args.end is None and args.window is None
            last_s = _TRACE_S if flag == "perfetto" and whole else args.window
            window = export_window(db, chosen, begin=args.begin, end=args.end, last_s=last_s)
            print(_write(flag, db, window, path))
    except OSError as error:
        raise ConfigError(
            f"the export cannot be written: {error}; choose another place or make room"
        ) from None
    return 0


def _check_target(flag: str, path: Path) -> None:
    from twofold.api.errors import ConfigError

    if flag == "perfetto":
        if path.is_dir():
            raise ConfigError(f"--perfetto was given the directory {path}; expected a file name")
        if not path.parent.is_dir():
            raise ConfigError(
                f"--perfetto: directory {path.parent} does not exist; create it or name another"
            )
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--{flag} {path} cannot be used as a directory: {error}; name another") from None


def _write(flag: str, db: Any, window: Any, path: Path) -> str:
    from twofold.telemetry import exports
    from twofold.tools.cli.bar import Bar

    span = f"run {window.run.run_id}, {window.num_steps:,} steps"
    if flag == "perfetto":
        with Bar("writing", "steps", 1) as bar:
            count = exports.write_perfetto(db, window, path, bar.show)
        emulated = "; times of the device are emulated" if window.run.emulated else ""
        return f"{path}: {count:,} trace events of {span}{emulated}; open it in https://ui.perfetto.dev"
    write = exports.write_parquet if flag == "parquet" else exports.write_csv
    counts: Mapping[str, int] = write(db, window, path)
    rows = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return f"{path}: {span}; rows: {rows or 'none'}"
