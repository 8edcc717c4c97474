#!/usr/bin/env python3
"""Runs chat users against a server for a while and prints their measurements; called by `make loadtest`.

    python loadtest/run.py --users 10 --seconds 60 --host http://127.0.0.1:10002

During the run, samples go to the server's telemetry database (the dashboard's page "Load test") or, where the server
has no telemetry, to a JSON-lines file. When the time is over, answers in progress are completed. Exit code: 0; 1 when
any request failed or none was answered; 2 for bad arguments or a server that does not answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Locust patches the standard library for its green threads, so it is imported first.
import locust  # noqa: F401  isort: skip

import argparse
import time
from typing import Any

import gevent
import httpx
from gevent.event import Event
from locust.env import Environment
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.http_client import check_url

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest import locustfile, samples  # noqa: E402
from loadtest.workers import Workers  # noqa: E402

DRAIN_S = 60.0


class UnreachableError(Exception):
    """No server answers, or it is not an OpenAI server."""


def main() -> int:
    args = parse_arguments()
    try:
        host = check_url(args.host, flag="--host", allow_remote=args.allow_remote_host)
        model = args.model or served_model(host)
    except (ConfigError, UnreachableError) as error:
        print(error, file=sys.stderr)
        return 2
    environment = Environment(user_classes=[locustfile.ChatUser], events=locustfile.events, host=host)
    environment.stop_timeout = DRAIN_S
    environment.loadtest_model = model
    environment.loadtest_workers = Workers()
    locustfile.prepare(environment, allow_remote=args.allow_remote_host, output=args.output)
    print(f"{args.users} users chat with {model} at {host} for {args.seconds} s …", flush=True)
    begun_s = time.monotonic()
    run_users(environment, args.users, args.spawn_rate, args.seconds)
    store = environment.loadtest_store
    store.flush()
    print(
        f"\n{describe(host)}\n\n{samples.report(store.samples, time.monotonic() - begun_s)}\n\n{store.where()}"
    )
    failed = sum(not sample.ok for sample in store.samples)
    return 1 if failed or not store.samples else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--host", default="http://127.0.0.1:10002", help="address of the server (default: %(default)s)"
    )
    parser.add_argument("--users", type=bounded(1, locustfile.MAX_USERS), default=10, help="concurrent users")
    parser.add_argument(
        "--seconds", type=bounded(1, 3600), default=60, help="seconds in which users start requests"
    )
    parser.add_argument(
        "--spawn-rate", type=float, default=2.0, help="new users per second (default: %(default)s)"
    )
    parser.add_argument("--model", default="", help="requested model (default: the served one)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        help="directory for samples that the server does not store (default: here)",
    )
    parser.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours",
    )
    args = parser.parse_args()
    if not 0.01 <= args.spawn_rate <= 1000:
        parser.error(f"--spawn-rate {args.spawn_rate} is out of range; expected 0.01 to 1000")
    if not args.output.is_dir():
        parser.error(f"--output {args.output} is not a directory")
    return args


def bounded(low: int, high: int) -> Any:
    """An argparse type: a whole number within limits, so that every test ends."""

    def parse(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def get_json(url: str) -> Any:
    return httpx.get(url, timeout=10, trust_env=False).raise_for_status().json()


def served_model(host: str) -> str:
    try:
        return str(get_json(f"{host}/v1/models")["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UnreachableError(
            f"no OpenAI server answers at {host} ({error}); start one with `make run` or give its --host"
        ) from None


def describe(host: str) -> str:
    """The loaded model and accelerator, and whether it is emulated; the times are always the users' wall clock."""
    try:
        health = get_json(f"{host}/health")
        accelerator = str(health.get("accelerator", "unknown accelerator"))
    except (httpx.HTTPError, ValueError, AttributeError):
        return "the server no longer answers /health"
    note = " (emulated; times are the users' wall clock)" if accelerator.startswith("emulated") else ""
    return f"{health.get('model', 'model')} on {accelerator}{note}"


def run_users(environment: Environment, users: int, spawn_rate: float, seconds: int) -> None:
    runner = environment.create_local_runner()
    ended = Event()
    helpers = [
        gevent.spawn(locustfile.pass_samples_on, environment, ended),
        gevent.spawn(show_progress, environment, seconds, ended),
    ]
    try:
        runner.start(users, spawn_rate=spawn_rate)
        gevent.sleep(seconds)
    except KeyboardInterrupt:
        print("\nended early", flush=True)
    runner.quit()
    runner.greenlet.join()
    ended.set()
    gevent.joinall(helpers)


def show_progress(environment: Environment, seconds: int, ended: Event) -> None:
    begun_s = time.monotonic()
    while not ended.wait(5):
        done = environment.loadtest_store.samples
        failed = sum(not sample.ok for sample in done)
        elapsed_s = time.monotonic() - begun_s
        print(
            f"  {min(elapsed_s, seconds):4.0f} s  {environment.runner.user_count:3} users  {len(done):5} requests  "
            f"{failed} failed",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
