"""Reading a streamed answer: times by a clock the test moves, and every way a stream can be broken."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from loadtest.chat_stream import MalformedStreamError, read_chat_stream


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n"


def delta(**content: object) -> bytes:
    finish = content.pop("finish_reason", None)
    return data({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})


ROLE = delta(role="assistant", content="")
END = delta(finish_reason="stop")
DONE = b"data: [DONE]\n"


class Clock:
    """Seconds; each line of the stream takes one tenth."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def lines(self, *lines: bytes) -> Iterator[bytes]:
        for line in lines:
            self.now_s += 0.1
            yield line


def read(*lines: bytes):
    clock = Clock()
    return read_chat_stream(clock.lines(*lines), 100.0, clock)


def test_times_and_tokens_of_a_good_stream() -> None:
    usage = data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
    result = read(
        b": comment\n", ROLE, b"\n", delta(content="Once"), delta(content=" upon"), END, usage, DONE
    )
    assert result.ttft_ms == pytest.approx(400)
    assert result.e2e_ms == pytest.approx(800)
    assert result.tpot_ms == pytest.approx((800 - 400) / 3)
    assert result.completion_tokens == 4
    assert result.text == "Once upon"
    assert result.finish_reason == "stop"


def test_without_usage_pieces_are_counted() -> None:
    result = read(delta(content="a"), delta(content="b"), delta(content="c", finish_reason="length"), DONE)
    assert result.completion_tokens == 3
    assert result.finish_reason == "length"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_first_token_may_be_of_reasoning(field: str) -> None:
    assert read(ROLE, delta(**{field: "hm"}), delta(content="x"), END, DONE).ttft_ms == pytest.approx(200)


def test_an_answer_may_be_empty_or_of_one_token() -> None:
    empty = read(ROLE, END, DONE)
    assert (empty.ttft_ms, empty.tpot_ms, empty.completion_tokens) == (None, None, 0)
    assert read(delta(content="x"), END, DONE).tpot_ms is None


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "without a finish reason"),
        ([ROLE, delta(content="x")], "without a finish reason"),
        ([ROLE, END], "without \\[DONE\\]"),
        ([ROLE, END, END, DONE], "two finish reasons"),
        ([ROLE, END, DONE, ROLE], "data after \\[DONE\\]"),
        ([b"event: message\n"], "not a data event"),
        ([b"<html>\n"], "not a data event"),
        ([b"data: {oops\n"], "not JSON"),
        ([b"data: 7\n"], "without choices"),
        ([data({"object": "x"})], "without choices"),
        ([data({"choices": [{"index": 0}]})], "without a delta"),
        ([data({"choices": [], "usage": {"completion_tokens": "4"}})], "without completion_tokens"),
        ([ROLE, data({"error": {"message": "engine broke"}})], "error within the stream: engine broke"),
    ],
)
def test_a_broken_stream_is_a_failure_that_says_why(lines: list[bytes], complaint: str) -> None:
    with pytest.raises(MalformedStreamError, match=complaint):
        read(*lines)
