"""Users who chat: each asks for a fairy tale, reads the streamed answer, thinks and asks again.

`python loadtest/run.py` (or `make loadtest`) runs them without a web page and prints a summary; `locust -f
loadtest/locustfile.py --host http://127.0.0.1:10002` starts Locust's web page. Locust's own request time ends with the
response's headers; TTFT, TPOT and E2E are separate events, in milliseconds.
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
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.tools.loadgen.http_client import check_url

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest.prompts import FOLLOW_UPS, OPENINGS  # noqa: E402
from loadtest.samples import Sample, SampleStore  # noqa: E402
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
        answer = AnswerStream(time.perf_counter())
        error: str | None = None
        with self.client.post(
            "/v1/chat/completions", json=body, name=NAME, stream=True, catch_response=True
        ) as response:
            try:
                self._read(response, answer)
            except MalformedStreamError as malformed:
                error = str(malformed)
            except FAILURE_EXCEPTIONS as broken:
                error = f"the connection broke: {broken}"
            if error is None:
                response.success()
            else:
                response.failure(error)
        self._keep(answer, error, (time.perf_counter() - answer.sent_s) * 1e3)

    def _read(self, response: Any, answer: AnswerStream) -> None:
        if response.status_code != 200:
            cause = f"HTTP {response.status_code}" if response.status_code else f"no answer: {response.error}"
            raise MalformedStreamError(cause)
        content_type = response.headers.get("content-type", "") if response.headers else ""
        if not content_type.startswith("text/event-stream"):
            raise MalformedStreamError(f"content-type {content_type!r}, expected text/event-stream")
        for line in _lines(response.stream):
            answer.line(line, time.perf_counter())
        answer.end()

    def _keep(self, answer: AnswerStream, error: str | None, took_ms: float) -> None:
        fire = self.environment.events.request.fire
        ok = error is None
        if not ok:
            self.messages = []
        else:
            self.messages.append({"role": "assistant", "content": answer.text})
            for kind, value in (
                ("TTFT", answer.ttft_ms),
                ("TPOT", answer.tpot_ms),
                ("E2E", answer.e2el_ms),
            ):
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
                e2e_ms=(answer.e2el_ms or took_ms) if ok else took_ms,
                ok=ok,
                ttft_ms=answer.ttft_ms if ok else None,
                tpot_ms=answer.tpot_ms if ok else None,
                completion_tokens=answer.completion_tokens if ok else 0,
                error=error[:1000] if error else None,
                request_id=answer.request_id,
            )
        )


def _lines(stream: Any) -> Iterator[bytes]:
    while line := stream.readline(b"\n"):
        yield bytes(line)


def prepare(environment: Environment, *, allow_remote: bool, output: Path) -> None:
    """Check the host, name the test and start passing samples on. ConfigError if load on the host is not allowed."""
    host = check_url(environment.host or "", flag="--host", allow_remote=allow_remote)
    environment.host = host
    workers = environment.loadtest_workers
    workers.begin()
    environment.loadtest_id = workers.loadtest_id
    environment.loadtest_store = SampleStore(host, output / f"{workers.file_name}.jsonl")


def pass_samples_on(environment: Environment, ended: Event) -> None:
    """Flush samples every second until `ended` is set; run in a greenlet."""
    while not ended.wait(FLUSH_INTERVAL_S):
        environment.loadtest_store.flush()


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="twofold-tales", help="model to ask for")
    parser.add_argument("--output", default=".", help="directory for samples that the server does not store")
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
    if options is None:  # run.py has prepared everything
        return
    try:
        prepare(environment, allow_remote=options.allow_remote_host, output=Path(options.output))
    except ConfigError as error:
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
