"""`twofold telemetry runs`: the runs of a database, newest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `twofold telemetry runs`."""
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="most runs to list (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def run(args: argparse.Namespace, url: str) -> int:
    """Print one line per run."""
    from twofold.api.errors import ConfigError
    from twofold.telemetry import queries

    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; expected 1 or more")
    db = queries.open_database(url)
    listed = [_facts(db, each) for each in queries.runs(db, limit=args.limit)]
    if args.json:
        for facts in listed:
            print(json.dumps(facts))
    elif listed:
        print("\n".join(_table(listed)))
    else:
        print(f"{db.path} holds no run yet")
    return 0


def _facts(db: Any, run: Any) -> dict[str, Any]:
    from twofold.telemetry import queries

    steps, requests = queries.step_totals(db, run), queries.request_counts(db, run)
    return {
        "run_id": run.run_id,
        "run_name": run.run_name,
        "run_tags": run.run_tags.split(",") if run.run_tags else [],
        "started_s": run.started_s,
        "seconds": (run.finished_s or run.last_seen_s) - run.started_s,
        "state": run.state(),
        "model": run.model,
        "accelerator": run.accelerator,
        "emulated": run.emulated,
        "telemetry_level": queries.level_of(run),
        "requests": requests.total,
        "steps": steps.num_steps,
        "tokens": steps.num_prefill_tokens + steps.num_decode_tokens,
        "lost_events": sum(entry.num_events for entry in queries.dropped(db, run)),
        "version": run.version,
    }


def _table(listed: Sequence[dict[str, Any]]) -> list[str]:
    """Aligned lines, under a line of titles."""
    lines = [
        ["run", "started", "length", "state", "level", "requests", "steps", "tokens", "lost", "model", "name"]
    ]
    for facts in listed:
        emulated = " (emulated)" if facts["emulated"] else ""
        lines.append(
            [
                str(facts["run_id"]),
                datetime.fromtimestamp(facts["started_s"]).strftime("%Y-%m-%d %H:%M"),
                f"{facts['seconds']:,.0f} s",
                facts["state"],
                facts["telemetry_level"],
                *(f"{facts[name]:,}" for name in ("requests", "steps", "tokens", "lost_events")),
                f"{facts['model']} on {facts['accelerator'].removeprefix('emulated:')}{emulated}",
                " ".join([facts["run_name"], *(f"#{tag}" for tag in facts["run_tags"])]).strip(),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
