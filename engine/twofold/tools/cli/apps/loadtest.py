"""`twofold loadtest`: runs users of several kinds against a server, by stages or by arrivals."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, NoReturn

from twofold.api.errors import ConfigError
from twofold.tools.cli.apps.folders import app_folder, become
from twofold.tools.cli.number_options import add_options, number, whole
from twofold.tools.loadgen.http_client import check_url
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan, Spread
from twofold.tools.loadgen.shapes import SHAPES
from twofold.tools.loadgen.slo import parse_slos
from twofold.tools.loadgen.user_kinds import USER_KINDS, parse_mix

DEFAULT: LoadTestPlan = LoadTestPlan()
_DAY_S = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    _add_users(parser.add_argument_group("Users"))
    _add_report(parser.add_argument_group("Report"))
    _add_spread(parser.add_argument_group("Several processes or machines (Locust's options)"))


def _add_users(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        [
            ("--users", "N", whole(1, 1000), DEFAULT.users, "most concurrent users (closed loop)"),
            (
                "--rate",
                "R",
                number(0.01, 1000),
                None,
                "open loop: conversations that start per second at Poisson times, at most (default: closed loop)",
            ),
            ("--seconds", "S", number(1, _DAY_S), DEFAULT.seconds, "seconds in which requests start"),
            ("--spawn-rate", "R", number(0.01, 1000), DEFAULT.spawn_rate, "users that start per second"),
            (
                "--max-output-tokens",
                "N",
                whole(4, 100_000),
                DEFAULT.max_output_tokens,
                "most tokens of an answer",
            ),
            ("--seed", "N", whole(0, 2**31), DEFAULT.seed, "seed of prompts, lengths and arrivals"),
        ],
    )
    group.add_argument(
        "--mix",
        type=_checked(parse_mix),
        default=DEFAULT.mix,
        metavar="KIND[:WEIGHT][,…]",
        help=f"kinds of users and their weights, of {', '.join(USER_KINDS)}, e.g. chat:8,agent:2 (default: chat)",
    )
    group.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default=DEFAULT.shape,
        help="load over time, in stages: constant; ramp up, then hold; step: four levels; spike: five times the load "
        "for a while; soak: constant in four equal stages (default: constant)",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        type=_checked(parse_slos),
        default=(),
        metavar="LIMITS",
        help="objectives, e.g. ttft_p95_ms=500,itl_p95_ms=50; a missed one makes the exit code 1, and goodput counts "
        "the answers within all",
    )
    group.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory for samples that the server does not store (default: here)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write figures and samples to this file")
    group.add_argument(
        "--ui",
        action="store_true",
        help="start Locust's web page instead: its form holds the load that was asked for; without --mix, --rate, "
        "--shape or --slo the kinds of users are chosen there",
    )
    add_options(group, [("--ui-port", "PORT", whole(1, 65_535), 8089, "port of the page, on 127.0.0.1")])


def _add_spread(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--master",
        action="store_true",
        help="run no users here; wait for --expect-workers and write their result",
    )
    group.add_argument(
        "--worker",
        action="store_true",
        help="run users for the master, which sends the plan and gets the samples",
    )
    add_options(
        group,
        [
            ("--processes", "N", whole(1, 64), None, "workers that the master starts on this machine"),
            (
                "--expect-workers",
                "N",
                whole(1, 1000),
                None,
                "with --master: workers to wait for (default: 1)",
            ),
            ("--master-bind-port", "PORT", whole(1, 65_535), 5557, "with --master: port for workers"),
            ("--master-port", "PORT", whole(1, 65_535), 5557, "with --worker: port of the master"),
        ],
    )
    group.add_argument(
        "--master-bind-host",
        default="127.0.0.1",
        metavar="HOST",
        help="with --master: address for workers (default: 127.0.0.1, so only those of this machine)",
    )
    group.add_argument(
        "--master-host",
        default="127.0.0.1",
        metavar="HOST",
        help="with --worker: the master (default: 127.0.0.1)",
    )


def _spread(args: argparse.Namespace) -> Spread:
    """ConfigError for options that exclude one another."""
    if args.worker:
        for flag in ("master", "processes", "expect_workers"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--worker and --{flag.replace('_', '-')} were both given; a worker takes its plan from the master"
                )
        return Spread("worker", host=args.master_host, port=args.master_port)
    if args.expect_workers and not args.master:
        raise ConfigError("--expect-workers was given without --master; give both, or --processes alone")
    if args.master:
        expected = args.expect_workers or (0 if args.processes else 1)
        return Spread("master", args.processes or 0, expected, args.master_bind_host, args.master_bind_port)
    return Spread("master", args.processes) if args.processes else Spread()


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that name the server; `loadtest capacity` has them too."""
    group = parser.add_argument_group("Which server")
    group.add_argument(
        "--host", default=DEFAULT.host, metavar="URL", help=f"address of the server (default: {DEFAULT.host})"
    )
    group.add_argument(
        "--model", default="", metavar="NAME", help="model to ask for (default: the first served)"
    )
    group.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours. Keys come from OPENAI_API_KEY, or "
        "TWOFOLD_API_KEY",
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Check the arguments and become the load test. ConfigError for arguments that cannot be used."""
    host = check_url(args.host, flag="--host", allow_remote=args.allow_remote_host)
    if not args.output.is_dir():
        raise ConfigError(f"--output {str(args.output)!r} was given; an existing directory is expected")
    folder = app_folder("loadtest")
    need_locust()
    if args.ui:
        print(f"Locust's page: http://127.0.0.1:{args.ui_port} (Ctrl-C ends it)")
        become(_locust(args, host, folder))
    plan = LoadTestPlan(
        host=host,
        model=args.model,
        mix=args.mix,
        users=args.users,
        rate=args.rate,
        shape=args.shape,
        seconds=args.seconds,
        spawn_rate=args.spawn_rate,
        max_output_tokens=args.max_output_tokens,
        seed=args.seed,
        slos=args.slo,
        output=str(args.output),
        json_file="" if args.json is None else str(args.json.absolute()),
        allow_remote_host=args.allow_remote_host,
        spread=_spread(args),
    )
    become([str(folder / "run.py"), plan.to_json()])


def _locust(args: argparse.Namespace, host: str, folder: Path) -> list[str]:
    """Locust's own command, with its page on this machine only."""
    for flag in ("json", "master", "worker", "processes", "expect_workers"):
        if getattr(args, flag):
            raise ConfigError(
                f"--ui and --{flag.replace('_', '-')} were both given; leave one out: the page runs its users in one "
                "process and has downloads of its own"
            )
    is_chosen = (
        args.mix is not DEFAULT.mix or args.rate is not None or args.shape != DEFAULT.shape or args.slo
    )
    arguments = ["-m", "locust", "-f", str(folder / "locustfile.py")]
    arguments += ["--web-host", "127.0.0.1", "--web-port", str(args.ui_port), "--host", host]
    arguments += ["--users", str(args.users), "--spawn-rate", f"{args.spawn_rate:g}", "--stop-timeout", "60"]
    arguments += ["--run-time", f"{round(args.seconds)}s", "--shape", args.shape, "--seed", str(args.seed)]
    arguments += ["--model", args.model, "--max-output-tokens", str(args.max_output_tokens)]
    arguments += ["--output", str(args.output)]
    arguments += ["--allow-remote-host"] if args.allow_remote_host else []
    if not is_chosen:
        return [*arguments, "--class-picker"]
    arguments += ["--mix", ",".join(f"{kind}:{weight}" for kind, weight in args.mix.items())]
    arguments += ["--slo", ",".join(each.option for each in args.slo)] if args.slo else []
    if args.rate is not None:
        return [*arguments, "--arrival-rate", f"{args.rate:g}", "OpenLoopUser"]
    return [*arguments, *(f"{kind.title().replace('-', '')}User" for kind in args.mix)]


def need_locust() -> None:
    """Raise ModuleNotFoundError here, where the message names the extra."""
    if importlib.util.find_spec("locust") is None:
        raise ModuleNotFoundError("locust is not installed", name="locust")


def _checked(parse: Any) -> Any:
    """`parse` as an argparse type: its ConfigError becomes the parser's error."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
