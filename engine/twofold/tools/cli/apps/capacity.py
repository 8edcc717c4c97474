"""`twofold loadtest capacity`: the highest arrival rate at which a server holds its objectives."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from twofold.api.errors import ConfigError
from twofold.tools.cli.apps.folders import app_folder, become
from twofold.tools.cli.apps.loadtest import add_server_arguments
from twofold.tools.cli.number_options import add_options, number, whole
from twofold.tools.loadgen.capacity import Search
from twofold.tools.loadgen.http_client import check_url
from twofold.tools.loadgen.loadtest_plan import CapacityPlan
from twofold.tools.loadgen.slo import parse_slos


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    group = parser.add_argument_group("Search")
    group.add_argument(
        "--slo",
        required=True,
        metavar="LIMITS",
        help="objectives that the rate must hold, e.g. ttft_p95_ms=500,itl_p95_ms=50",
    )
    rate = number(0.01, 1000)
    add_options(
        group,
        [
            (
                "--low",
                "R",
                rate,
                0.5,
                "conversations per second to begin with; doubled until an objective is missed",
            ),
            ("--high", "R", rate, 100.0, "highest rate to try"),
            ("--tolerance", "SHARE", number(0.01, 1), 0.05, "stop when held and missed rates are this close"),
            ("--repeats", "N", whole(1, 9), 3, "loads per rate; the majority decides"),
            ("--max-runs", "N", whole(1, 1000), 60, "most loads altogether"),
            ("--seconds", "S", number(1, 3600), 20.0, "seconds in which one load starts requests"),
            ("--input-len", "N", whole(16, 1_000_000), 512, "most tokens of a prompt; lengths are drawn"),
            ("--output-len", "N", whole(4, 100_000), 128, "most tokens of an answer; lengths are drawn"),
            ("--seed", "N", whole(0, 2**31), 0, "seed of prompts, lengths and arrivals"),
        ],
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")


def run(args: argparse.Namespace) -> NoReturn:
    """Check the arguments and start the search. ConfigError for arguments that cannot be used."""
    if args.low > args.high:
        raise ConfigError(f"--low {args.low:g} was given; it must not exceed --high, {args.high:g}")
    slos = parse_slos(args.slo)
    if not slos:
        raise ConfigError("--slo is empty; give at least one objective, e.g. ttft_p95_ms=500")
    plan = CapacityPlan(
        slos=slos,
        search=Search(args.low, args.high, args.tolerance, args.repeats, max_runs=args.max_runs),
        host=check_url(args.host, flag="--host", allow_remote=args.allow_remote_host),
        model=args.model,
        seconds=args.seconds,
        input_len=args.input_len,
        output_len=args.output_len,
        seed=args.seed,
        json_file="" if args.json is None else str(args.json.absolute()),
        allow_remote_host=args.allow_remote_host,
    )
    become([str(app_folder("loadtest") / "capacity.py"), plan.to_json()])
