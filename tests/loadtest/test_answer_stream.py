"""Reading a streamed answer: times by a clock the test moves, and every way a stream can be broken."""

from __future__ import annotations

import json

import pytest
from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n"


def delta(**content: object) -> bytes:
    finish = content.pop("finish_reason", None)
    return data({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})


ROLE = delta(role="assistant", content="")
END = delta(finish_reason="stop")
DONE = b"data: [DONE]\n"


def read(*lines: bytes) -> AnswerStream:
    """Each line of the stream takes a tenth of a second."""
    answer = AnswerStream(100.0)
    for number, line in enumerate(lines, 1):
        answer.line(line, 100.0 + 0.1 * number)
    answer.end()
    return answer


def test_times_and_tokens_of_a_good_stream() -> None:
    usage = data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
    result = read(
        b": comment\n", ROLE, b"\n", delta(content="Once"), delta(content=" upon"), END, usage, DONE
    )
    assert result.ttft_ms == pytest.approx(400)
    assert result.e2el_ms == pytest.approx(800)
    assert result.tpot_ms == pytest.approx((800 - 400) / 3)
    assert result.itls_ms == pytest.approx([100])
    assert result.completion_tokens == 4
    assert result.text == "Once upon"
    assert result.finish_reason == "stop"


def test_usage_counts_prompt_and_cached_tokens() -> None:
    details = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    reported = read(delta(content="x"), END, data({"choices": [], "usage": details}), DONE)
    assert (reported.prompt_tokens, reported.cached_tokens) == (5, 3)
    assert read(delta(content="x"), END, DONE).cached_tokens is None


def test_a_text_completion_is_read_as_well() -> None:
    first = data({"id": "cmpl-1", "choices": [{"index": 0, "text": "Once", "finish_reason": None}]})
    answer = read(first, data({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}), DONE)
    assert (answer.text, answer.request_id, answer.finish_reason) == ("Once", "cmpl-1", "length")


def test_without_usage_pieces_are_counted() -> None:
    result = read(delta(content="a"), delta(content="b"), delta(content="c", finish_reason="length"), DONE)
    assert result.completion_tokens == 3
    assert result.finish_reason == "length"


def test_a_tool_call_has_times_and_is_put_together() -> None:
    result = read(
        ROLE,
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "find", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        delta(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "read", "arguments": "{}"}}]),
        delta(finish_reason="tool_calls"),
        DONE,
    )
    assert (result.ttft_ms, len(result.itls_ms), result.text) == (pytest.approx(200), 3, "")
    assert [call["function"] for call in result.tool_calls.values()] == [
        {"name": "find", "arguments": '{"a":1}'},
        {"name": "read", "arguments": "{}"},
    ]
    assert [call["id"] for call in result.tool_calls.values()] == ["c1", "c2"]


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
        ([data({"choices": [7]})], "without a delta"),
        ([delta(content=7)], "no text"),
        ([data({"choices": [], "usage": {"completion_tokens": "4"}})], "without completion_tokens"),
        ([delta(tool_calls=[{"index": 0}])], "without a function"),
        ([ROLE, data({"error": {"message": "engine broke"}})], "error within the stream: engine broke"),
    ],
)
def test_a_broken_stream_is_a_failure_with_its_reason(lines: list[bytes], complaint: str) -> None:
    with pytest.raises(MalformedStreamError, match=complaint):
        read(*lines)


def test_kept_lines_are_parsed_at_the_end_with_the_times_at_which_they_came() -> None:
    answer = AnswerStream(100.0)
    for number, line in enumerate((delta(content="a"), delta(content="b"), END, DONE)):
        answer.keep(line, 101.0 + number)
    assert answer.pieces == []
    answer.end()
    assert (answer.text, list(answer.piece_s), answer.end_s) == ("ab", [101.0, 102.0], 104.0)


def test_an_error_within_the_stream_precedes_the_end_of_its_connection() -> None:
    answer = AnswerStream(100.0)
    answer.keep(delta(content="a"), 101.0)
    answer.keep(data({"error": {"message": "no memory"}}), 102.0)
    assert "no memory" in str(answer.first_error(ConnectionError("broken")))
    assert answer.text == "a"
    assert str(answer.first_error(ConnectionError("broken"))) == "broken"
