"""Answers read in every dialect: as the models' own templates write them, in whatever pieces, and damaged."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS

from tests.text.parser_cases import CASES, TOOLS, Case, answer_of, check, parsed


def damaged(case: Case, rng: random.Random) -> str:
    """One to four damages: pieces lost, doubled, moved or made of other marks and of characters that mean something."""
    texts = [other.text for other in CASES.values() if other.tool == case.tool]
    text = case.text
    for _ in range(rng.randrange(1, 5)):
        begin = rng.randrange(len(text) + 1)
        end = min(len(text), begin + rng.choice((1, 2, 5, 20, 200)))
        other = rng.choice(texts)
        start = rng.randrange(len(other))
        kind = rng.choices(range(6), (6, 6, 6, 6, 6, 1))[0]
        if kind == 0:
            text = text[:begin] + text[end:]
        elif kind == 1:
            text = text[:end] + text[begin:]
        elif kind == 2:
            text = text[:begin]
        elif kind == 3:
            text = text[:begin] + other[start : start + rng.choice((3, 30, 300))] + text[begin:]
        elif kind == 4:
            text = text[:begin] + rng.choice('{}[]()"\\,:<>|= \n\x00\ud7ff😀e') + text[end:]
        else:
            text = (
                text[:begin]
                + rng.choice((" ", "\n", "[", "{", '{"a":', "<tool_call>", "9")) * 1100
                + text[begin:]
            )
    return text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_parses_to_the_intended_calls(case: Case) -> None:
    assert answer_of(parsed(case, [case.text])) == case.expected
    check(case, case.text, random.Random(0))


def test_every_parser_has_a_case() -> None:
    assert {case.tool for case in CASES.values()} >= set(TOOL_PARSERS)
    assert {case.reasoning for case in CASES.values()} >= set(REASONING_PARSERS) - {"kimi_k2"}


def test_call_ids_are_accepted_by_templates() -> None:
    def ids(name: str) -> Iterator[str]:
        return (event.call_id for event in parsed(CASES[name], [CASES[name].text]) if event.kind == "call")

    assert list(ids("kimi_k2-calls-end-the-thinking")) == ["functions.f:0", "functions.g:1"]
    assert [len(call_id) for call_id in ids("mistral")] == [9, 9]
    assert next(ids("mistral-since-2025")) == "abcdefghi"
    drawn = list(ids("hermes"))
    assert len(set(drawn)) == 2
    assert {call_id[:5] for call_id in drawn} == {"call_"}


def test_arguments_are_streamed_as_generated() -> None:
    for name in ("hermes", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v3", "gemma4", "llama4_pythonic"):
        case = CASES[name]
        parser = AnswerParser(case.tool, case.reasoning, TOOLS, reasoning_opened=case.opened)
        # Up to the middle of the first argument's text.
        seen = parser.push(case.text[: case.text.index("a ") + 1])
        assert [event.text for event in seen if event.kind == "call"] == ["f"], name
        assert "".join(event.text for event in seen if event.kind == "arguments").endswith('"a'), name


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.text(alphabet='<>|/{}[]()"=: \n\\aftool_call', max_size=80),
    st.integers(),
)
def test_any_text_in_any_pieces(name: str, noise: str, seed: int) -> None:
    rng = random.Random(seed)
    case = CASES[name]
    cut = rng.randrange(len(case.text) + 1)
    check(case, case.text[:cut] + noise + case.text[cut:], rng)


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_calls_are_text(tool: str, count: int) -> None:
    cases = [case for case in CASES.values() if case.tool == tool]
    for seed in range(count):
        rng = random.Random(seed)
        case = cases[seed % len(cases)]
        check(case, damaged(case, rng), rng)


def test_a_forced_call_that_is_damaged_midway_is_never_text() -> None:
    """A number without end is no JSON that a client could use; the rest of a forced answer is dropped."""
    text = '<tool_call>\n{"name": "f", "arguments": {"n": ' + "8" * 20_000
    for only_calls in (True, False):
        parser = AnswerParser("hermes", None, [], only_calls=only_calls)
        events = [event for piece in (text[:40], text[40:]) for event in parser.push(piece)] + parser.finish()
        printed = "".join(event.text for event in events if event.kind in ("content", "call_damaged"))
        assert printed == ("" if only_calls else text)
