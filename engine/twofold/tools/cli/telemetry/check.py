"""`twofold telemetry check`: integrity, schema version, missing steps, lost events and sizes of a database."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `twofold telemetry check`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, url: str) -> int:
    """Print what was found; exit code 1 if the database is damaged or has gaps."""
    from dataclasses import asdict

    from twofold.telemetry import queries
    from twofold.telemetry.check import check_database

    report = check_database(queries.open_database(url))
    if args.json:
        print(json.dumps({**asdict(report), "problems": report.problems}, indent=2))
    else:
        print(f"{report.path}: schema version {report.schema_version}, {report.num_runs:,} runs")
        log = "" if report.log_bytes is None else f", log {report.log_bytes / 1e6:,.1f} MB"
        print(f"size: {report.file_bytes / 1e6:,.1f} MB{log}")
        for name, count in report.num_rows.items():
            print(f"  {name:<18} {count:>12,} rows")
        for problem in report.problems:
            print(f"problem: {problem}")
        print("problems: none" if not report.problems else f"problems: {len(report.problems)}")
    return 1 if report.problems else 0
