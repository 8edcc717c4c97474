"""Whatever one body holds, the others go on: parsed elsewhere, refused by its first error, tokenised only as far as
it can fit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
from fake_engine import EMULATED, FakeEngine, WordTokenizer
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import app_of, create_app
from twofold.server.bridge.models import prompt_tokens
from twofold.server.bridge.models.body_worker import MAX_VALUES, BodyWorker
from twofold.server.bridge.models.prompt_tokens import BoundedTokenizer, TooManyTokensError
from twofold.server.bridge.models.state import ServerState
from twofold.server.http.errors import ApiError
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.schemas import ChatRequest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}
BYTES = 4_000_000


def filled(head: bytes, piece: bytes, tail: bytes) -> bytes:
    return head + piece * ((BYTES - len(head) - len(tail)) // len(piece)) + tail


MESSAGE = b'{"role":"user","content":"a"}'
NASTY = {
    "text": (TEXT, filled(b'{"prompt":"', b"word ", b'"}')),
    "escapes": (TEXT, filled(b'{"prompt":"', b"\\u72d0 ", b'"}')),
    "ids": (TEXT, filled(b'{"prompt":[', b"1,", b"1]}")),
    "wrong ids": (TEXT, filled(b'{"prompt":[', b"-1,", b"-1]}")),
    "nested": (TEXT, filled(b'{"prompt":"a","x":[', b"[1],", b'1],"top_p":7}')),
    "deep": (TEXT, filled(b'{"x":', b"[", b"}")),
    "messages": (CHAT, filled(b'{"messages":[', MESSAGE + b",", MESSAGE + b"]}")),
}


@pytest.fixture(scope="module")
def worker():
    made = BodyWorker()
    yield made
    made.close()


@pytest.mark.slow
def test_no_body_stops_the_loop(worker):
    """Timed as the longest time the loop did not turn, against parsing the same bodies in this process."""
    engine = FakeEngine()
    state = ServerState(ServerConfig(), None)
    state.body_worker = worker
    state.ready(engine)
    worst_s: dict[str, float] = {}

    async def tick(done: threading.Event) -> float:
        worst = 0.0
        before = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, before = max(worst, now - before), now
        return worst

    with serving(app_of(state)) as url:
        for name, (path, body) in NASTY.items():
            done = threading.Event()
            statuses: list[int] = []

            def post(path=path, body=body, done=done, statuses=statuses) -> None:
                try:
                    statuses.append(HTTP.post(url + path, content=body, headers=JSON_TYPE).status_code)
                finally:
                    done.set()

            poster = threading.Thread(target=post)
            poster.start()
            worst_s[name] = asyncio.run(tick(done))
            poster.join()
            assert statuses == [400], name
    engine.close()
    assert engine.requests == []
    # In this process: 0.2 to 9 s. The bound of 20 ms is for a quiet machine; a busy one takes its share.
    assert max(worst_s.values()) < 0.15, worst_s


def test_the_worker_returns_the_same_as_parsing_in_process(worker):
    body = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "a"}], "temperature": 0.5, "other": 1}'
    assert worker.parse(ChatRequest, body, 64) == ChatRequest.model_validate_json(body[3:])
    long = json.dumps(
        {"messages": [{"role": "user", "content": "é狐 " * 9_000}, {"role": "user", "content": "short"}]}
    ).encode()
    assert worker.parse(ChatRequest, long, 64) == ChatRequest.model_validate_json(long)
    with pytest.raises(ApiError) as caught:
        worker.parse(CompletionRequest, b'{"prompt": [1, -2, -3]}', 64)
    assert (caught.value.status, caught.value.param) == (400, "prompt[1]")
    with pytest.raises(ApiError, match="64 tokens > 63 maximum; the context holds 64") as caught:
        worker.parse(CompletionRequest, b'{"prompt": [' + b"1," * 63 + b"1]}", 64)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_returned_data_is_bounded(worker):
    numbers = b"[" + b"1," * (MAX_VALUES + 100) + b"1]"
    tools = b'[{"type":"function","function":{"name":"f","parameters":{"enum":' + numbers + b"}}}]"
    body = b'{"messages":[' + MESSAGE + b'],"tool_choice":"none","tools":' + tools + b"}"
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        worker.parse(ChatRequest, body, 64)


@pytest.mark.slow
def test_a_worker_grown_by_a_body_is_replaced(worker):
    first = worker._process.pid
    # 10 million values take more than the 256 MiB after which it ends.
    with pytest.raises(ApiError):
        worker.parse(CompletionRequest, b'{"prompt":[' + b"0," * 10_000_000 + b"0]}", 64)
    second = worker._process.pid
    assert second != first
    os.kill(second, signal.SIGKILL)
    worker._process.wait()
    assert worker.parse(CompletionRequest, b'{"prompt": "a"}', 64).prompt == "a"


LONG = "word " * 34_841
LONG_CHAT = [{"role": "user", "content": LONG}]


class CountingTokenizer(WordTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text)


@pytest.mark.parametrize(
    ("text", "num_tokens", "most_chars"),
    [
        ("a b c", 3, 5),
        # Fits although it is long: 50 tokens of 10,000 characters.
        (("w" * 9_999 + " ") * 50, 50, 3 * 500_000),
        # Slightly too long: all of it is tokenised, and the exact number is reported.
        ("a " * 300, 300, 3 * 600),
        # Far too long: rejected after tokenising its beginning.
        ("a " * 4_000_000, None, 3 * 8 * 100),
    ],
)
def test_work_follows_the_context_and_not_the_text(text, num_tokens, most_chars):
    counting = CountingTokenizer()
    bounded = BoundedTokenizer(counting, 100)
    if num_tokens is None:
        with pytest.raises(TooManyTokensError) as caught:
            bounded.encode(text)
        refused = counting.num_chars
        assert caught.value.count() == 4_000_000
        counting.num_chars = refused
    else:
        assert len(bounded.encode(text)) == num_tokens
    assert counting.num_chars <= most_chars


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": LONG_CHAT}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": LONG_CHAT}, None),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": LONG_CHAT}, None),
        ("/api/chat", {"model": "fake-tales", "messages": LONG_CHAT}, None),
        ("/api/generate", {"model": "fake-tales", "prompt": LONG}, None),
        ("/api/generate", {"model": "fake-tales", "prompt": LONG, "raw": True}, None),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": LONG_CHAT}, "messages"),
    ],
)
def test_every_dialect_reports_the_length_of_a_prompt_that_is_far_too_long(engine, path, body, param):
    with serving(create_app(engine, ServerConfig(served_model_name=("fake,fake-tales",)))) as base:
        response = HTTP.post(base + path, json=body)
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400
    assert "prompt is too long: 34841 tokens > 63 maximum" in message
    if param is not None:
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 70}]}),
        (CHAT, {"messages": LONG_CHAT}),
        (TEXT, {"prompt": LONG}),
        (TEXT, {"prompt": [1] * 70}),
        (TEXT, {"prompt": [1] * 100_000}),  # parsed by the worker
    ],
)
def test_the_error_of_a_too_long_prompt_names_what_limits_the_context(path, body):
    why = "beyond index_topk attention is sparse"
    engine = FakeEngine(info=replace(EMULATED, context_limit_reason=why))
    with serving(create_app(engine, ServerConfig())) as base:
        response = HTTP.post(base + path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "prompt is too long" in message
    assert message.endswith(f"shorten the prompt ({why})")


def test_a_refused_prompt_is_counted_in_pieces_as_the_whole_is(monkeypatch):
    from twofold.models import bundled as bundled
    from twofold.text.tokenizer import Tokenizer
    from twofold.text.tokenizer.literal_text import PromptText

    tokenizer = Tokenizer.open(bundled.bundled_model_path())
    end = next(token for token in tokenizer.special_tokens.values())
    text = f"Once upon a time, 1 clever fox\n\n  said {end} twice to 22 hens. " * 400
    literal = PromptText(text, frozenset(at.start() for at in re.finditer(re.escape(end), text)))
    monkeypatch.setattr(prompt_tokens, "_COUNTED_CHARS", 1000)
    for prompt in (text, literal):
        with pytest.raises(TooManyTokensError) as caught:
            BoundedTokenizer(tokenizer, 64).encode(prompt)
        assert caught.value.count() == len(tokenizer.encode(prompt))
    # No words, no gaps: bounded pieces all the same.
    with pytest.raises(TooManyTokensError) as caught:
        BoundedTokenizer(tokenizer, 64).encode("x" * 10_000)
    assert caught.value.count() >= len(tokenizer.encode("x" * 10_000))


def test_tokenising_lets_other_threads_run():
    """`encode` of the tokenizers package keeps the GIL for all of it, its batch call does not."""
    from twofold.models import bundled as bundled
    from twofold.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(bundled.bundled_model_path())
    text = "Once upon a time there was a clever fox who lived in the wood. " * 8_000
    turns = 0
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10
