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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from twofold import __version__
from twofold.api.addresses import is_loopback
from twofold.api.config import DEFAULT_URL
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.whole_file import whole_file
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.number_options import add_options, number, several, whole
from twofold.tools.loadgen.generator import Load, LoadPlan
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError, api_key, check_url, served_model
from twofold.tools.loadgen.report import as_json, objectives, table
from twofold.tools.loadgen.sample_store import SampleStore
from twofold.tools.loadgen.server_process import serving
from twofold.tools.loadgen.slo import limits, parse_slos
from twofold.tools.loadgen.workload import CHAT, COMPLETIONS, Dataset, PromptShape, prepare

_GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
"""Metrics of vLLM's flag; --slo has ITL too."""
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
        help=f"limits of {', '.join(_GOODPUT_METRICS)} in milliseconds, for goodput, e.g. ttft:500 tpot:50",
    )
    group.add_argument(
        "--slo",
        default="",
        metavar="LIMITS",
        help="objectives over all answers, e.g. ttft_p95_ms=500,itl_p95_ms=50; a missed one makes the exit code 1",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write figures and samples to this file")
    group.add_argument(
        "--record",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send the samples to the server's telemetry database, for the dashboard (default: on)",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "model", nargs="?", metavar="MODEL", help="start a server for this model, and stop it afterwards"
    )
    group.add_argument(
        "--server-args",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help='flags for the server of MODEL, e.g. --server-args="--accelerator none --max-num-seqs 64"',
    )
    group.add_argument(
        "--base-url", metavar="URL", help=f"address of a running server (default: {DEFAULT_URL})"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="model to ask for (default: the first served)"
    )
    group.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours. Keys come from OPENAI_API_KEY, or "
        "TWOFOLD_API_KEY",
    )
    add_options(
        group,
        [("--start-timeout", "S", number(1, 86_400), 600, "seconds that its own server may take to load")],
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    at_once = (
        "conversations at the same time, or several to measure in turn (default: 1; with a rate: no limit)"
    )
    rate = "open loop: conversations that start per second, whether or not others have finished (default: closed loop)"
    burstiness = "1: Poisson arrivals; less: in bursts; inf: at constant intervals"
    add_options(
        group,
        [
            ("--num-prompts", "N", whole(1, 100_000), 100, "conversations"),
            ("--max-concurrency", "N[,N…]", several(whole(1, 4096)), None, at_once),
            ("--request-rate", "R", number(0.001, 100_000), None, rate),
            ("--burstiness", "B", number(0.01, math.inf), 1.0, burstiness),
            ("--duration", "S", number(0.1, 86_400), None, "seconds after which no request starts"),
            ("--timeout", "S", number(0.1, 86_400), 600.0, "seconds that one request may take"),
            ("--num-warmups", "N", whole(0, 1000), 1, "conversations before the measurement, not counted"),
            ("--seed", "N", whole(0, 2**31), 0, "seed of prompts and arrivals"),
        ],
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    lengths = several(whole(1, 1_000_000))
    turns = "requests of each conversation; from the second on, a prompt repeats the whole conversation"
    add_options(
        group,
        [
            (
                "--input-len",
                "N[,N…]",
                lengths,
                [1024],
                "tokens of a prompt, or several numbers to measure in turn",
            ),
            ("--output-len", "N", whole(1, 1_000_000), 128, "tokens of an answer"),
            (
                "--random-prefix-len",
                "N",
                whole(0, 1_000_000),
                0,
                "tokens of the prompt that all conversations share",
            ),
            ("--num-turns", "N", whole(1, 1000), 1, turns),
            ("--turn-input-len", "N", whole(1, 1_000_000), 64, "new tokens of each later request"),
            ("--temperature", "T", number(0, 2), 0.0, "sampling temperature; 0 is greedy"),
            ("--extra-body", "JSON", _object, None, "further fields of each request"),
        ],
    )
    group.add_argument(
        "--lengths",
        choices=("fixed", "chat"),
        default="fixed",
        help="fixed: exactly --input-len and --output-len; chat: drawn with a long tail, up to them (default: fixed)",
    )
    group.add_argument(
        "--dataset-name",
        choices=("random", "tale"),
        default="random",
        help="random tokens, or the running text of a tale (default: random)",
    )
    group.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHAT),
        help="completions take exact token ids, chat takes text (default: completions; with turns: chat)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give every answer its full length; not a field of OpenAI's own API (default: on)",
    )


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
        upper = "up to " if shape.drawn else ""
        turns = f" × {shape.num_turns} turns" if shape.num_turns > 1 else ""
        return f"{upper}{shape.input_len} + {shape.output_len} tokens{turns}, {', '.join(load)}"


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
            f"{args.num_prompts} prompts × {args.num_turns} turns × {args.output_len} tokens exceed the limit of "
            f"{_MAX_TOKENS}; lower one of these numbers"
        )
    slos = limits(dict(args.goodput)) + parse_slos(args.slo)
    return [
        _Cell(
            PromptShape(
                input_len,
                args.output_len,
                prefix_len=args.random_prefix_len,
                num_turns=args.num_turns,
                turn_input_len=args.turn_input_len,
                drawn=args.lengths == "chat",
                lengths_seed=args.seed,
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
    if args.model is None:
        url = check_url(args.base_url or DEFAULT_URL, flag="--base-url", allow_remote=args.allow_remote_host)
        yield HttpClient(url, api_key())
        return
    if args.base_url is not None:
        raise ConfigError(
            f"both the model {args.model!r} and --base-url {args.base_url!r} were given; give one"
        )
    serve = [sys.executable, "-m", "twofold.tools.cli", "serve"]
    command = [*serve, args.model, "--port", "0", *args.server_args]
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
        model = args.served_model_name or served_model(await client.json("GET", "/v1/models"))[0]
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
    store = SampleStore(client.base_url, datetime.now().strftime("bench-serve-%Y%m%d-%H%M%S"), None)
    print(f"{model} at {client.base_url}, {workload.path}")
    for cell in cells:
        with Bar("asking", "requests", 1) as bar:
            run = await Load(
                client, workload, cell.shape, cell.plan, progress=bar.show, stage=cell.title
            ).run()
        found = as_json(run)
        checks = [slo.check(run.samples) for slo in parse_slos(args.slo)]
        print(table(cell.title, found, cell.plan.slos), flush=True)
        if checks:
            print(objectives(checks), flush=True)
        failed |= found["failed"] > 0 or not found["completed"] or not all(check.met for check in checks)
        results.append(_result(cell, found, [check.as_json() for check in checks]))
        if args.record and is_loopback(urlsplit(client.base_url).hostname or ""):
            for sample in run.samples:
                store.add(sample)
            await asyncio.to_thread(store.flush)
    if store.num_sent:
        print(store.where())
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


def _result(cell: _Cell, found: dict[str, Any], checks: list[dict[str, Any]]) -> dict[str, Any]:
    """One load of the JSON document."""
    # JSON has no infinity.
    load = vars(cell.plan) | {"burstiness": str(cell.plan.burstiness)}
    load["slos"] = [vars(slo) for slo in cell.plan.slos]
    return {"shape": vars(cell.shape), "load": load, "objectives": checks} | found


def _extra_body(args: argparse.Namespace, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "temperature": args.temperature}
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body | (args.extra_body or {})


def _tale() -> str:
    from twofold.quantise.texts import default_text  # imports torch

    return default_text()


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in _GOODPUT_METRICS or not limit:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given; NAME:MS is expected, of {', '.join(_GOODPUT_METRICS)}, e.g. ttft:500"
        )
    return name, number(0, 1e9)(limit)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} was given; a JSON object is expected")
    return value
