"""`twofold bench serve`: load on a running server or one that it starts, measured at the clients."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from twofold import __version__
from twofold.api.config import DEFAULT_URL
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.whole_file import whole_file
from twofold.tools.cli.bar import Bar
from twofold.tools.loadgen.generator import LoadPlan, run_load
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError, check_url
from twofold.tools.loadgen.metrics import SLO_METRICS
from twofold.tools.loadgen.report import as_json, table
from twofold.tools.loadgen.server_process import serving
from twofold.tools.loadgen.workload import CHAT, COMPLETIONS, Dataset, PromptShape, prepare

_MAX_TOKENS: Final = 100_000_000
"""Limit for all answers of one load, because each token's arrival time is kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("Which server"))
    _add_load(parser.add_argument_group("How much, and when"))
    _add_prompts(parser.add_argument_group("What is asked"))
    group = parser.add_argument_group("Report")
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_slo,
        default=[],
        metavar="NAME:MS",
        help=f"most milliseconds of {', '.join(SLO_METRICS)} that count as good, e.g. ttft:500 tpot:50",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write figures and samples to this file")


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "model", nargs="?", metavar="MODEL", help="start a server of its own for this model, and end it"
    )
    group.add_argument(
        "--server-args",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help='for `twofold serve` with MODEL, e.g. --server-args="--accelerator none --max-num-seqs 64"',
    )
    group.add_argument("--base-url", metavar="URL", help=f"of a running server (default: {DEFAULT_URL})")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="model to ask for (default: the first served)"
    )
    group.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours. Keys come from OPENAI_API_KEY, or "
        "TWOFOLD_API_KEY",
    )
    group.add_argument(
        "--start-timeout",
        type=_number(1, 86_400),
        default=600,
        metavar="S",
        help="for its own server to load",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-prompts",
        type=_whole(1, 100_000),
        default=100,
        metavar="N",
        help="conversations (default: 100)",
    )
    group.add_argument(
        "--max-concurrency",
        type=_several(_whole(1, 4096)),
        metavar="N[,N…]",
        help="conversations at the same time, or several to measure in turn (default: 1; with a rate: no bound)",
    )
    group.add_argument(
        "--request-rate",
        type=_number(0.001, 100_000),
        metavar="R",
        help="open loop: so many begin per second, whether or not others are done (default: closed loop)",
    )
    group.add_argument(
        "--burstiness",
        type=_number(0.01, math.inf),
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; less: in bursts; inf: by the clock (default: 1)",
    )
    group.add_argument(
        "--duration", type=_number(0.1, 86_400), metavar="S", help="no request begins later than this"
    )
    group.add_argument(
        "--timeout",
        type=_number(0.1, 86_400),
        default=600.0,
        metavar="S",
        help="for one request (default: 600)",
    )
    group.add_argument(
        "--num-warmups", type=_whole(0, 1000), default=1, metavar="N", help="conversations first, not counted"
    )
    group.add_argument(
        "--seed", type=_whole(0, 2**31), default=0, help="of prompts and arrivals (default: 0)"
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-len",
        type=_several(_whole(1, 1_000_000)),
        default=[1024],
        metavar="N[,N…]",
        help="tokens of a prompt, or several to measure in turn (default: 1024)",
    )
    group.add_argument(
        "--output-len", type=_whole(1, 1_000_000), default=128, metavar="N", help="tokens of an answer"
    )
    group.add_argument(
        "--dataset-name",
        choices=("random", "tale"),
        default="random",
        help="random tokens, or the running text of a tale (default: random)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=_whole(0, 1_000_000),
        default=0,
        metavar="N",
        help="tokens of the prompt that all conversations share (default: 0)",
    )
    group.add_argument(
        "--num-turns",
        type=_whole(1, 1000),
        default=1,
        metavar="N",
        help="of each conversation; from the second on a prompt is all that was said and more (default: 1)",
    )
    group.add_argument(
        "--turn-input-len", type=_whole(1, 1_000_000), default=64, metavar="N", help="tokens that a turn adds"
    )
    group.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        help="completions take exact token ids, chat takes text (default: completions; with turns: chat)",
    )
    group.add_argument("--temperature", type=_number(0, 2), default=0.0, help="default: 0, greedy")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every answer has its full length; not a field of OpenAI's own API (default: on)",
    )
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="further fields")


@dataclass(frozen=True)
class _Cell:
    """One load of the sweep."""

    shape: PromptShape
    plan: LoadPlan

    @property
    def title(self) -> str:
        shape, plan = self.shape, self.plan
        load = []
        if plan.request_rate is not None:
            load.append(f"{plan.request_rate:g} per second")
        if plan.max_concurrency is not None:
            load.append(f"{plan.max_concurrency} at once")
        turns = f" × {shape.num_turns} turns" if shape.num_turns > 1 else ""
        return f"{shape.input_len} + {shape.output_len} tokens{turns}, {', '.join(load)}"


def run(args: argparse.Namespace) -> int:
    cells = _cells(args)
    with _server(args) as client:
        return asyncio.run(_measure(client, args, cells))


def _cells(args: argparse.Namespace) -> list[_Cell]:
    """The sweep's loads. ConfigError for options that contradict each other."""
    if args.num_turns > 1 and args.endpoint == COMPLETIONS:
        raise ConfigError(f"--num-turns {args.num_turns} needs --endpoint {CHAT}: conversations are chats")
    if args.random_prefix_len >= min(args.input_len):
        raise ConfigError(
            f"--random-prefix-len was given {args.random_prefix_len}; it must be below --input-len, "
            f"{min(args.input_len)}"
        )
    if args.num_prompts * args.num_turns * args.output_len > _MAX_TOKENS:
        raise ConfigError(
            f"{args.num_prompts} prompts × {args.num_turns} turns × {args.output_len} tokens are more than the "
            f"{_MAX_TOKENS} whose times are kept; lower one of them"
        )
    slos = dict(args.goodput)
    return [
        _Cell(
            PromptShape(
                input_len, args.output_len, args.random_prefix_len, args.num_turns, args.turn_input_len
            ),
            LoadPlan(
                num_prompts=args.num_prompts,
                max_concurrency=concurrency,
                request_rate=args.request_rate,
                burstiness=args.burstiness,
                duration_s=args.duration,
                timeout_s=args.timeout,
                num_warmups=args.num_warmups,
                seed=args.seed,
                slos=slos,
            ),
        )
        for input_len in args.input_len
        for concurrency in args.max_concurrency or [None if args.request_rate else 1]
    ]


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[HttpClient]:
    """The server under load, for the duration of the block. ConfigError for an address that may not be loaded."""
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("TWOFOLD_API_KEY") or None
    if args.model is None:
        url = check_url(args.base_url or DEFAULT_URL, flag="--base-url", allow_remote=args.allow_remote_host)
        yield HttpClient(url, key)
        return
    if args.base_url is not None:
        raise ConfigError(
            f"both the model {args.model!r} and --base-url {args.base_url!r} were given; give one"
        )
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "serve",
        args.model,
        "--port",
        "0",
        *args.server_args,
    ]
    if sys.stderr.isatty():
        print(f"starting a server for {args.model} …", file=sys.stderr, flush=True)
    # OpenAI's key must not go to another server; our server's key has a name of its own.
    own_key = os.environ.get("TWOFOLD_API_KEY") or None
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(command, Path(folder) / "server.log", timeout_s=args.start_timeout) as server,
    ):
        yield HttpClient(server.url, own_key)


async def _measure(client: HttpClient, args: argparse.Namespace, cells: list[_Cell]) -> int:
    try:
        model = args.served_model_name or await _served_model(client)
        workload = await prepare(
            client,
            path=args.endpoint or (CHAT if args.num_turns > 1 else COMPLETIONS),
            dataset=cast(Dataset, args.dataset_name),
            tale=_tale(),
            input_len=min(args.input_len),
            extra_body=_extra_body(args, model),
            seed=args.seed,
        )
    except (OSError, ValueError, HttpStatusError) as error:
        raise CapacityError(f"no OpenAI server answers at {client.base_url}: {error}") from None
    results: list[dict[str, Any]] = []
    failed = False
    print(f"{model} at {client.base_url}, {workload.path}")
    for cell in cells:
        bar = Bar("asking", "requests", 1)
        run = await run_load(client, workload, cell.shape, cell.plan, bar.show)
        bar.clear()
        found = as_json(run)
        print(table(cell.title, found, cell.plan.slos), flush=True)
        failed |= found["failed"] > 0 or not found["completed"]
        # JSON has no infinity.
        load = vars(cell.plan) | {"burstiness": str(cell.plan.burstiness)}
        results.append({"shape": vars(cell.shape), "load": load} | found)
    if args.json is not None:
        head = {
            "version": __version__,
            "base_url": client.base_url,
            "model": model,
            "endpoint": workload.path,
        }
        document = head | {"dataset_name": args.dataset_name, "results": results}
        with whole_file(args.json) as part:
            part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(failed)


async def _served_model(client: HttpClient) -> str:
    listed = await client.json("GET", "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        raise ValueError("its /v1/models lists no model; give --served-model-name") from None


def _extra_body(args: argparse.Namespace, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "temperature": args.temperature}
    if args.ignore_eos:
        body["ignore_eos"] = True
    body |= args.extra_body
    return body


def _tale() -> str:
    from twofold.quantise.texts import default_text  # imports torch

    return default_text()


def _whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number within limits, so that every load ends."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(
                f"{text!r} was given; a whole number from {low} to {high} is expected"
            )
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= float(text) <= high:
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r} was given; a number from {low:g} to {high:g} is expected")

    return parse


def _several(parse_one: Callable[[str], int]) -> Callable[[str], list[int]]:
    return lambda text: [parse_one(part) for part in text.split(",")]


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in SLO_METRICS or not limit:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given; NAME:MS is expected, of {', '.join(SLO_METRICS)}, e.g. ttft:500"
        )
    return name, _number(0, 1e9)(limit)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} was given; a JSON object is expected")
    return value
