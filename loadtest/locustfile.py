"""Users who chat: each asks for a fairy tale, reads the streamed answer, thinks, asks again.

`python loadtest/run.py` (or `make loadtest`) runs them without a web page and sums up; `locust -f
loadtest/locustfile.py --host http://127.0.0.1:10002` gives Locust's own. Besides the request itself, whose
time is time to the response's headers, TTFT, TPOT and E2E are events of their own, in milliseconds.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gevent
from gevent.event import Event
from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment
from locust.exception import StopUser

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest.chat_stream import ChatResult, MalformedStreamError, read_chat_stream  # noqa: E402
from loadtest.prompts import FOLLOW_UPS, OPENINGS  # noqa: E402
from loadtest.samples import Sample, SampleStore, check_host  # noqa: E402
from loadtest.workers import Workers  # noqa: E402

NAME = "chat"
FLUSH_INTERVAL_S = 1.0
MAX_USERS = 1000


class ChatUser(FastHttpUser):
    """One person at a keyboard."""

    wait_time = between(0.2, 1.5)
    network_timeout = 120.0
    connection_timeout = 10.0
    max_redirects = 0
    default_headers: ClassVar = {"Accept-Encoding": "identity", "Accept": "text/event-stream"}

    def on_start(self) -> None:
        self.number = self.environment.loadtest_workers.enter()
        self.random = random.Random(self.number)  # noqa: S311  the same conversations in every run
        self.messages: list[dict[str, str]] = []

    def on_stop(self) -> None:
        self.environment.loadtest_workers.leave()

    @task
    def chat(self) -> None:
        rng = self.random
        if self.messages and len(self.messages) < 4 and rng.random() < 0.3:
            self.messages.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
        else:
            self.messages = [{"role": "user", "content": rng.choice(OPENINGS)}]
        body = {
            "model": self.environment.loadtest_model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": rng.choice((32, 64, 64, 128)),
            "temperature": 0.8,
            "seed": rng.randrange(2**31),
        }
        sent_s = time.perf_counter()
        result: ChatResult | None = None
        error: str | None = None
        answer_ids: list[str] = []
        with self.client.post(
            "/v1/chat/completions", json=body, name=NAME, stream=True, catch_response=True
        ) as response:
            try:
                result = self._read(response, sent_s, answer_ids)
            except MalformedStreamError as malformed:
                error = str(malformed)
            except FAILURE_EXCEPTIONS as broken:
                error = f"the connection broke: {broken}"
            if error is None:
                response.success()
            else:
                response.failure(error)
        self._keep(result, error, (time.perf_counter() - sent_s) * 1e3, answer_ids)

    def _read(self, response: Any, sent_s: float, answer_ids: list[str]) -> ChatResult:
        if response.status_code != 200:
            cause = f"HTTP {response.status_code}" if response.status_code else f"no answer: {response.error}"
            raise MalformedStreamError(cause)
        content_type = response.headers.get("content-type", "") if response.headers else ""
        if not content_type.startswith("text/event-stream"):
            raise MalformedStreamError(f"content-type {content_type!r}, expected text/event-stream")
        return read_chat_stream(_lines(response.stream), sent_s, time.perf_counter, answer_ids.append)

    def _keep(
        self, result: ChatResult | None, error: str | None, took_ms: float, answer_ids: list[str]
    ) -> None:
        fire = self.environment.events.request.fire
        if result is None:
            self.messages = []
        else:
            self.messages.append({"role": "assistant", "content": result.text})
            for kind, value in (("TTFT", result.ttft_ms), ("TPOT", result.tpot_ms), ("E2E", result.e2e_ms)):
                if value is not None:
                    fire(
                        request_type=kind,
                        name=NAME,
                        response_time=value,
                        response_length=0,
                        exception=None,
                        context={},
                    )
        self.environment.loadtest_store.add(
            Sample(
                loadtest_id=self.environment.loadtest_id,
                finished_s=time.time(),
                user=self.number,
                num_users=self.environment.loadtest_workers.total(),
                e2e_ms=result.e2e_ms if result else took_ms,
                ok=result is not None,
                ttft_ms=result.ttft_ms if result else None,
                tpot_ms=result.tpot_ms if result else None,
                completion_tokens=result.completion_tokens if result else 0,
                error=error[:1000] if error else None,
                request_id=answer_ids[0] if answer_ids else None,
            )
        )


def _lines(stream: Any) -> Iterator[bytes]:
    while line := stream.readline(b"\n"):
        yield bytes(line)


def prepare(environment: Environment, *, allow_remote: bool, output: Path) -> None:
    """Check the host, name the test and start passing samples on. ValueError when the host may not be loaded."""
    host = check_host(environment.host or "", allow_remote=allow_remote)
    environment.host = host
    workers = environment.loadtest_workers
    workers.begin()
    environment.loadtest_id = workers.loadtest_id
    environment.loadtest_store = SampleStore(host, output / f"{workers.file_name}.jsonl")


def pass_samples_on(environment: Environment, ended: Event) -> None:
    """Every second until `ended` is set; to be spawned."""
    while not ended.wait(FLUSH_INTERVAL_S):
        environment.loadtest_store.flush()


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="twofold-tales", help="model to ask for")
    parser.add_argument("--output", default=".", help="directory for samples the server does not take")
    parser.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours",
    )


@events.init.add_listener
def _on_init(environment: Environment, **_kwargs: Any) -> None:
    environment.loadtest_workers = Workers(environment.runner)


@events.test_start.add_listener
def _on_test_start(environment: Environment, **_kwargs: Any) -> None:
    options = environment.parsed_options
    if options is None:  # run.py has prepared everything itself
        return
    try:
        prepare(environment, allow_remote=options.allow_remote_host, output=Path(options.output))
    except ValueError as error:
        print(error, file=sys.stderr)
        environment.process_exit_code = 2
        environment.runner.quit()
        raise StopUser(str(error)) from None
    environment.loadtest_model = options.model
    environment.loadtest_ended = Event()
    gevent.spawn(pass_samples_on, environment, environment.loadtest_ended)


@events.test_stop.add_listener
def _on_test_stop(environment: Environment, **_kwargs: Any) -> None:
    store = getattr(environment, "loadtest_store", None)
    if environment.parsed_options is not None and store is not None:
        environment.loadtest_ended.set()
        store.flush()
