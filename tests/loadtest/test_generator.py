"""Loads in virtual time over real sockets: the server answers by a script, so every moment is known beforehand."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from twofold.api.errors import ConfigError
from twofold.tools.loadgen.arrivals import arrival_times
from twofold.tools.loadgen.generator import Load, LoadPlan
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.metrics import Run
from twofold.tools.loadgen.slo import limits
from twofold.tools.loadgen.workload import CHAT, COMPLETIONS, PromptShape, Workload, prepare
from virtual_loop import run_virtually

Script = Callable[["Exchange"], Awaitable[None]]
IDS = Workload(COMPLETIONS, "random", list(range(100, 200)), {"model": "m"})
WORDS = Workload(CHAT, "tale", [f"w{number}" for number in range(50)], {"model": "m"})
SHAPE = PromptShape(input_len=8, output_len=3)


class Exchange:
    """One request at the server, and its way to answer."""

    def __init__(self, server: ScriptedServer, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        self.server, self.path, self.body = server, path, body
        self.begun_s = asyncio.get_running_loop().time() - server.begun_s
        self._writer = writer
        self._chunked = False

    def send(self, data: bytes) -> None:
        if not self._chunked:
            self._writer.write(data)
            return
        # An event in two chunks, as a proxy may cut it.
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            if part:
                self._writer.write(b"%x\r\n%b\r\n" % (len(part), part))

    def head(self, status: int = 200, *headers: str) -> None:
        self.send("\r\n".join([f"HTTP/1.1 {status} X", *headers, "", ""]).encode())
        self._chunked = "Transfer-Encoding: chunked" in headers

    def event(self, value: object) -> None:
        self.send(b"data: " + json.dumps(value).encode() + b"\n\n")

    def json(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.head(status, f"Content-Length: {len(content)}")
        self.send(content)

    async def pieces(self, *delays_s: float) -> None:
        for delay_s in delays_s:
            await asyncio.sleep(delay_s)
            self.event(
                {"choices": [{"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": None}]}
            )

    def end(self, num_tokens: int, cached: int = 0) -> None:
        self.event({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 8, "completion_tokens": num_tokens}
        self.event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
        self.send(b"data: [DONE]\n\n")
        if self._chunked:
            self._writer.write(b"0\r\n\r\n")


class ScriptedServer:
    """Answers every request by `script`, and keeps the requests."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.exchanges: list[Exchange] = []
        self.num_open = self.most_open = 0
        self.begun_s = asyncio.get_running_loop().time()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            (int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0
        )
        body = json.loads(await reader.readexactly(size)) if size else None
        exchange = Exchange(self, head.split()[1], body, writer)
        self.exchanges.append(exchange)
        try:
            await self._script(exchange)
        finally:
            self.num_open -= 1
            writer.close()


async def in_seven_tenths(exchange: Exchange) -> None:
    """TTFT 500, two gaps of 100 ms."""
    exchange.head(200, "Transfer-Encoding: chunked")
    await exchange.pieces(0.5, 0.1, 0.1)
    exchange.end(3)


def with_server(script: Script, use: Callable[[HttpClient], Awaitable[Any]]) -> tuple[Any, ScriptedServer]:
    async def main() -> tuple[Any, ScriptedServer]:
        scripted = ScriptedServer(script)
        server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await use(HttpClient(f"http://127.0.0.1:{port}", "key")), scripted

    result: tuple[Any, ScriptedServer] = run_virtually(main())
    return result


def load(
    script: Script, plan: LoadPlan, *, work: Workload = IDS, shape: PromptShape = SHAPE
) -> tuple[Run, ScriptedServer]:
    return with_server(script, lambda client: Load(client, work, shape, plan).run())


def sent_at(server: ScriptedServer) -> list[float]:
    return [exchange.begun_s for exchange in server.exchanges]


def test_the_closed_loop_keeps_so_many_under_way_and_times_them() -> None:
    done: list[tuple[int, int]] = []
    plan = LoadPlan(num_prompts=4, max_concurrency=2, slos=limits({"ttft": 501}))
    run, server = with_server(
        in_seven_tenths, lambda client: Load(client, IDS, SHAPE, plan, lambda *at: done.append(at)).run()
    )
    figures = run.figures()
    expected = {
        "duration": 1.4,
        "completed": 4,
        "failed": 0,
        "total_input_tokens": 32,
        "total_output_tokens": 12,
        "request_throughput": 4 / 1.4,
        "request_goodput": 4 / 1.4,
        "output_throughput": 12 / 1.4,
        "mean_ttft_ms": 500,
        "p99_ttft_ms": 500,
        "median_tpot_ms": 100,
        "mean_itl_ms": 100,
        "p95_e2el_ms": 700,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert sent_at(server) == pytest.approx([0, 0, 0.7, 0.7])
    assert server.most_open == 2
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    bodies = [exchange.body for exchange in server.exchanges]
    assert all(len(body["prompt"]) == 8 and body["max_tokens"] == 3 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 4


def test_the_open_loop_sends_when_requests_arrive_whatever_is_under_way() -> None:
    run, server = load(in_seven_tenths, LoadPlan(5, request_rate=10, burstiness=math.inf))
    assert sent_at(server) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert server.most_open == 5
    assert run.duration_s == pytest.approx(1.1)
    _, poisson = load(in_seven_tenths, LoadPlan(20, request_rate=10, seed=3))
    assert sent_at(poisson) == pytest.approx(list(islice(arrival_times(10, 1.0, 3), 20)))


def test_a_bound_on_the_open_loop_delays_requests_and_is_reported() -> None:
    run, server = load(in_seven_tenths, LoadPlan(4, 2, request_rate=10, burstiness=math.inf))
    assert sent_at(server) == pytest.approx([0, 0.1, 0.7, 0.8])
    assert [sample.waited_s for sample in run.samples] == pytest.approx([0, 0, 0.5, 0.5])
    figures = run.figures()
    assert figures["max_waited_at_client_ms"] == pytest.approx(500)
    assert figures["p99_ttft_ms"] == pytest.approx(500), "the wait is reported separately"


@pytest.mark.parametrize(
    ("plan", "sent_s"),
    [
        (LoadPlan(100, 1, duration_s=1.5), [0, 0.7, 1.4]),
        (LoadPlan(100, None, request_rate=2, burstiness=math.inf, duration_s=1.2), [0, 0.5, 1.0]),
        (LoadPlan(100, 1, request_rate=2, burstiness=math.inf, duration_s=1.2), [0, 0.7]),
    ],
)
def test_no_request_begins_after_the_time_and_those_that_have_may_end(
    plan: LoadPlan, sent_s: list[float]
) -> None:
    run, server = load(in_seven_tenths, plan)
    assert sent_at(server) == pytest.approx(sent_s)
    assert run.figures()["completed"] == len(sent_s)


async def refuse(exchange: Exchange) -> None:
    exchange.json(429, {"error": {"message": "all places are taken", "code": "rate_limit_exceeded"}})


async def break_down(exchange: Exchange) -> None:
    exchange.head(500)
    exchange.send(b"<html>oops")


async def report_an_error(exchange: Exchange) -> None:
    exchange.head()
    await exchange.pieces(0.1)
    exchange.event({"error": {"message": "failed in layer 3"}})


async def hang_up(exchange: Exchange) -> None:
    exchange.head(200, "Transfer-Encoding: chunked")
    await exchange.pieces(0.1)


async def stop_early(exchange: Exchange) -> None:
    exchange.head()
    await exchange.pieces(0.1)


async def never_end(exchange: Exchange) -> None:
    exchange.head()
    await exchange.pieces(0.1, 3600.0)


async def send_nothing(exchange: Exchange) -> None:
    await asyncio.sleep(0.1)


async def speak_otherwise(exchange: Exchange) -> None:
    exchange.send(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (refuse, "HTTP 429 rate_limit_exceeded", "all places are taken"),
        (break_down, "HTTP 500", "<html>oops"),
        (report_an_error, "error within the stream", "failed in layer 3"),
        (hang_up, "ConnectionError", "without sending complete message body"),
        (stop_early, "malformed stream", "without a finish reason"),
        (never_end, "timeout", "not complete after 5 s"),
        (send_nothing, "ConnectionError", "without sending a response"),
        (speak_otherwise, "ConnectionError", "without sending a response"),
    ],
)
def test_a_failure_is_counted_by_its_kind_and_the_others_continue(
    script: Script, kind: str, words: str
) -> None:
    async def second_fails(exchange: Exchange) -> None:
        await (script if len(exchange.server.exchanges) == 2 else in_seven_tenths)(exchange)

    run, _ = load(second_fails, LoadPlan(3, 1, timeout_s=5))
    figures = run.figures()
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 6)
    (error,) = figures["errors"]
    assert (error["kind"], error["count"]) == (kind, 1)
    assert words in error["first"]
    assert figures["p99_ttft_ms"] == pytest.approx(500), "a broken answer is in no figure but its own"


def test_a_missing_server_is_an_error_too() -> None:
    run = run_virtually(Load(HttpClient("http://127.0.0.1:1"), IDS, SHAPE, LoadPlan(2, 1)).run())
    assert [error["kind"] for error in run.figures()["errors"]] == ["ConnectionError"]


def test_conversations_grow_by_their_answers() -> None:
    shape = PromptShape(8, 3, num_turns=3, turn_input_len=4)

    async def second_conversation_breaks(exchange: Exchange) -> None:
        if len(exchange.server.exchanges) == 5:
            await refuse(exchange)
            return
        exchange.head()
        await exchange.pieces(0.1, 0.1)
        exchange.end(2, cached=4)

    run, server = load(second_conversation_breaks, LoadPlan(2, 1), work=WORDS, shape=shape)
    *whole, _, refused = [exchange.body["messages"] for exchange in server.exchanges]
    assert [[turn["role"] for turn in messages] for messages in whole] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
    ]
    assert whole[2][:3] == whole[1]
    assert whole[1][1] == {"role": "assistant", "content": "xx"}
    assert [len(turn["content"].split()) for turn in whole[2] if turn["role"] == "user"] == [8, 4, 4]
    assert refused[0] != whole[0][0]
    figures = run.figures()
    assert [turn["completed"] for turn in figures["turns"]] == [2, 1, 1], "a broken conversation ends"
    assert figures["turns"][1]["mean_cached_tokens"] == 4
    assert figures["failed"] == 1


def test_drawn_lengths_are_those_of_the_conversation_and_the_same_for_every_seed_of_prompts() -> None:
    shape = PromptShape(300, 90, drawn=True, lengths_seed=4)
    lengths = [(shape.of_conversation(n).input_len, shape.of_conversation(n).output_len) for n in range(200)]
    assert len(set(lengths)) > 100
    assert max(lengths)[0] == 300
    assert {output for _, output in lengths} >= {90}
    _, server = load(in_seven_tenths, LoadPlan(3, 1), shape=shape)
    requested = [(len(exchange.body["prompt"]), exchange.body["max_tokens"]) for exchange in server.exchanges]
    assert requested == lengths[:3]
    assert PromptShape(300, 90).of_conversation(5).input_len == 300


def test_a_shared_prefix_is_shared_and_warm_ups_are_neither_counted_nor_asked_again() -> None:
    shape = PromptShape(8, 3, prefix_len=5)
    run, server = load(in_seven_tenths, LoadPlan(2, 1, num_warmups=2), shape=shape)
    prompts = [exchange.body["prompt"] for exchange in server.exchanges]
    assert len(run.samples) == 2
    assert run.duration_s == pytest.approx(1.4)
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 4


async def tokenizing(exchange: Exchange) -> None:
    """Three tokens a word, and five around a conversation; completions are counted in `usage` alone."""
    body = exchange.body
    if exchange.path == "/tokenize" and "prompt" in body:
        ids = [number % 7 for number in range(3 * len(body["prompt"].split()))]
        exchange.json(200, {"tokens": ids, "count": len(ids)})
    elif exchange.path == "/tokenize":
        exchange.json(200, {"count": 5 + 3 * len(body["messages"][0]["content"].split())})


async def counting(exchange: Exchange) -> None:
    """A server without /tokenize."""
    if exchange.path == "/tokenize":
        exchange.json(404, {})
    else:
        exchange.json(200, {"usage": {"prompt_tokens": 2 * len(exchange.body["prompt"].split())}})


async def counting_nothing(exchange: Exchange) -> None:
    exchange.json(200, {})


@pytest.mark.parametrize(
    ("script", "path", "dataset", "size"),
    [
        (tokenizing, COMPLETIONS, "random", 60),
        (tokenizing, COMPLETIONS, "tale", 60),
        (tokenizing, CHAT, "random", (60 - 5) // 3),
        (counting, COMPLETIONS, "tale", 30),
    ],
)
def test_prompts_get_their_length_by_what_the_server_counts(
    script: Script, path: str, dataset: Any, size: int
) -> None:
    tale = "Once upon a time there was a miller"
    work, _ = with_server(
        script,
        lambda client: prepare(
            client, path=path, dataset=dataset, tale=tale, input_len=60, extra_body={"model": "m"}, seed=1
        ),
    )
    body = work.conversation(0, PromptShape(60, 3)).body(1)
    prompt = body["messages"][0]["content"] if path == CHAT else body["prompt"]
    words = prompt.split() if isinstance(prompt, str) else prompt
    assert len(words) == size
    assert set(words) <= (set(tale.split()) if isinstance(prompt, str) else set(range(7)))


def test_a_server_without_usage_counts_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be right"):
        with_server(
            counting_nothing,
            lambda client: prepare(
                client, path=CHAT, dataset="tale", tale="a b", input_len=60, extra_body={}, seed=0
            ),
        )
