"""Calls held to their schemas in every dialect: whatever is written under the grammar, the dialect's parser reads as
such calls, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from twofold.api.constraints import Constraint
from twofold.api.errors import RequestError
from twofold.engine import grammar_source
from twofold.text.chat.answer_grammar import Calls, answer_constraint
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.call_forms import FORMS
from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS, tokens_of
from twofold.text.chat.marks import ChatMarks

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"$ref": "#/$defs/number"}, "maxItems": 2},
        "exact": {"type": "boolean"},
        "const": {"anyOf": [{"$ref": "#/$defs/number"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "number", "description": "any"}},
}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "any": {"type": "object"}, "now": None}


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    function = {"name": name, "parameters": SCHEMAS[name], "strict": strict}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


TOOLS = [tool(name) for name in SCHEMAS]
END = 256


class Writer:
    """Writes what a grammar allows, at random, with bytes and marks as its tokens."""

    def __init__(self, tools: str, reasoning: str | None, special: bool) -> None:
        marks = tokens_of(tools, reasoning)
        self.pieces = [bytes([byte]) for byte in range(END)] + [
            b"<|im_end|>",
            *(mark.encode() for mark in marks),
        ]
        dialect = REASONING_PARSERS.get(reasoning or "")
        self.ends = [FORMS[tools].parameter[1], FORMS[tools].end] if tools in FORMS else []
        self.ends += dialect.ends if dialect is not None else ()
        self.ids = {piece.decode(): END + at for at, piece in enumerate(self.pieces[END:])}
        self.special = set(self.ids.values()) if special else {END}
        self.unfinished = ""
        """The last text that did not end in time."""
        table = grammar_source.TokenTable(self.pieces, sorted(self.special))
        self.tokens = table.compiled([END])

    def special_id(self, mark: str) -> int | None:
        found = self.ids.get(mark)
        return found if found in self.special else None

    def written(self, constraint: Constraint, seed: int, most: int = 500) -> str | None:
        """None: it did not end in time."""
        source = grammar_source.grammar_of(constraint.kind, constraint.text, None, constraint.frame)
        matcher, error = grammar_source.compiled(self.tokens, source)
        assert not error, constraint
        chance, text = random.Random(seed), b""
        for _ in range(most):
            if matcher.is_stopped():
                return text.decode()
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(self.pieces)) if mask[token // 8] >> token % 8 & 1]
            # Marks, ends and what closes are likelier, and text is mostly ASCII; the end of a text that is no token
            # is a word, which chance alone would seldom write to its last letter.
            begun = self._next_of_ends(text)
            weights = [
                60.0
                if token in begun
                else 6.0
                if token >= END
                else 4.0
                if chr(token) in '"}])></0'
                else 1.0
                if 32 <= token < 127 or token == 10
                else 0.02
                for token in allowed
            ]
            token = chance.choices(allowed, weights)[0]
            if token == END:
                return text.decode()
            assert matcher.consume_token(token)
            text += self.pieces[token]
        self.unfinished = text.decode(errors="ignore")
        return None

    def _next_of_ends(self, text: bytes) -> set[int]:
        """Bytes that go on with an end of which the text has two or more."""
        ends = [end.encode() for end in self.ends]
        return {end[most] for end in ends for most in range(2, len(end)) if text.endswith(end[:most])}


class Read:
    """Parsed form of an answer."""

    def __init__(self, text: str, tools: str, reasoning: str | None, opened: bool = False) -> None:
        parser = AnswerParser(tools, reasoning, TOOLS, reasoning_opened=opened)
        self.content, self.damaged = "", False
        self.calls: list[list[str]] = []
        for event in parser.push(text) + parser.finish():
            if event.kind == "call":
                self.calls.append([event.text, ""])
            elif event.kind == "arguments":
                self.calls[-1][1] += event.text
            elif event.kind == "content":
                self.content += event.text
            self.damaged |= event.kind == "call_damaged"

    def check(self, held: tuple[str, ...] = tuple(SCHEMAS)) -> None:
        assert not self.damaged
        for name, arguments in self.calls:
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if name in held:
                schema = SCHEMAS[name] or {"properties": {}, "additionalProperties": False}
                jsonschema.Draft202012Validator(schema).validate(value)


def reasoning_of(name: str) -> str | None:
    return {"openai": "openai_gptoss", "llama4_json": None, "mistral": "mistral"}.get(name, "qwen3")


CAN = [
    # Marks as plain text take the longer way through the vocabulary.
    pytest.param(name, special, marks=() if special else pytest.mark.slow)
    for name in TOOL_PARSERS
    for special in (False, True)
    if special or name != "openai"  # whose marks always are tokens
]


@pytest.mark.parametrize(("name", "special"), CAN)
def test_a_forced_answer_is_calls_that_match(name: str, special: bool) -> None:
    reasoning = reasoning_of(name)
    writer = Writer(name, reasoning, special)
    num_done = 0
    for seed in range(12):
        opened = bool(seed % 3 == 1 and reasoning and name != "openai")
        only = "weather" if seed % 4 == 3 else None
        constraint = answer_constraint(
            None,
            Calls(TOOLS, True, only, several=only is None),
            ChatMarks(name, reasoning),
            opened=opened,
            special_id=writer.special_id,
        )
        assert constraint is not None
        text = writer.written(constraint, seed)
        if text is None:
            continue
        num_done += 1
        read = Read(text, name, reasoning, opened)
        assert read.calls, text
        assert not read.content.strip(), text
        read.check()
        assert {call[0] for call in read.calls} <= ({only} if only else SCHEMAS.keys())
        assert len(read.calls) == 1 or only is None
    assert num_done >= 4


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_forced_answer_that_is_cut_has_no_text(name: str) -> None:
    """Wherever it is cut: every call that begins is there, the last with the beginning of its arguments."""
    reasoning = reasoning_of(name)
    writer = Writer(name, reasoning, special=True)
    marks, calls = ChatMarks(name, reasoning), Calls(TOOLS, True, "weather", several=False)
    constraint = answer_constraint(
        None, calls, marks, opened=False, closed=True, special_id=writer.special_id
    )
    assert constraint is not None
    texts = [writer.written(constraint, seed) or writer.unfinished for seed in range(8)]
    text = max(texts, key=len)
    written = set()
    for end in range(1, len(text)):
        parser = AnswerParser(name, reasoning, TOOLS)
        events = parser.push(text[:end]) + parser.finish(cuts_calls=True)
        assert {event.kind for event in events} <= {
            "call",
            "arguments",
            "call_end",
            "call_cut",
            "reasoning",
            "skipped",
        }
        assert "".join(event.raw for event in events) == text[:end]
        assert {event.text for event in events if event.kind == "call"} <= SCHEMAS.keys()
        written.add("".join(event.text for event in events if event.kind == "arguments"))
    assert len(written) > 3


@pytest.mark.parametrize(("name", "special"), CAN)
def test_strict_tools_are_held_wherever_a_call_begins(name: str, special: bool) -> None:
    """Text is free, thinking too, and what the parser takes for a call matches; or the answer is of the form asked."""
    reasoning = reasoning_of(name)
    writer = Writer(name, reasoning, special)
    kinds = set()
    tools = [tool("weather", strict=True), tool("any")]
    forms = [None, Constraint("json_schema", '{"const": ["x"]}', field="response_format")]
    for seed in range(16):
        requested = forms[seed % 2]
        if requested is not None and TOOL_PARSERS[name].at_start:
            continue
        constraint = answer_constraint(
            requested, Calls(tools), ChatMarks(name, reasoning), opened=False, special_id=writer.special_id
        )
        assert constraint is not None
        text = writer.written(constraint, seed)
        if text is None:
            continue
        read = Read(text, name, reasoning)
        read.check(("weather",))
        kinds.add("call" if read.calls else "text")
        if requested is not None and not read.calls:
            assert "".join(read.content.split()).endswith('["x"]')
    assert kinds


@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("gemma4", {"name": "f", "strict": True, "parameters": {"properties": {"a": {"allOf": [{}, {}]}}}}, "allOf"),
        ("llama4_pythonic", {"name": "a:b"}, "cannot be written"),
        ("qwen3_coder", {"name": "f", "parameters": {"properties": {"a b": {}}}}, "cannot be written"),
        ("hermes", {"name": "f", "parameters": {"type": "array"}}, "arguments are an object"),
        ("hermes", {"name": "f", "strict": True, "parameters": {"not": {"required": ["a"]}}}, "f: not: this keyword"),
        ("hermes", {"name": "f", "parameters": {"required": "a"}}, "f: parameters.required: must be a list"),
        ("glm45", {"name": "f", "strict": True, "parameters": {"anyOf": [{}]}}, "anyOf"),
    ],
)  # fmt: skip
def test_a_constraint_that_a_dialect_lacks_is_reported(
    name: str, function: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        answer_constraint(
            None,
            Calls([{"type": "function", "function": function}], True),
            ChatMarks(name),
            opened=False,
            special_id=lambda mark: None,
        )
    assert refusal.value.param == "tools"


EVERYDAY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {
            "anyOf": [{"enum": ["C", "F"], "type": "string"}, {"type": "null"}],
            "default": None,
            "title": "U",
        },
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]$"},
        "word": {"type": "string", "minLength": 1, "maxLength": 3},
        "few": {
            "anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 10, "maximum": 99}]
        },
        "level": {"$ref": "#/$defs/Level"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Level"}, "maxItems": 1},
    },
    "required": ["unit", "day", "code", "word", "few", "level", "tags"],
    "additionalProperties": False,
    "title": "Arguments",
    "$defs": {"Level": {"enum": ["low", "high"], "title": "Level", "type": "string"}},
}
"""A signature with optional literals, dates, patterns, lengths and enumerations, as pydantic writes it."""


@pytest.mark.parametrize(
    "name", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2", "hy_v3", "gemma4", "lfm2", "hermes"]
)
def test_strict_tools_of_everyday_signatures(name: str, caplog: pytest.LogCaptureFixture) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": EVERYDAY, "strict": True}}]
    writer, num_done = Writer(name, None, special=True), 0
    constraint = answer_constraint(
        None,
        Calls(offered, True, "f", several=False),
        ChatMarks(name),
        opened=False,
        special_id=writer.special_id,
    )
    assert constraint is not None
    for seed in range(6):
        text = writer.written(constraint, seed, most=900)
        if text is None:
            continue
        parser = AnswerParser(name, None, offered)
        events = parser.push(text) + parser.finish()
        arguments = "".join(event.text for event in events if event.kind == "arguments")
        checker = jsonschema.Draft202012Validator(EVERYDAY, format_checker=jsonschema.FormatChecker(["date"]))
        checker.validate(json.loads(arguments))
        num_done += 1
    assert num_done >= 3
    assert "is not enforced" not in caplog.text


def test_what_a_format_cannot_express_is_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Keywords of a text between tags, and any of a tool that is not strict."""
    address = {"type": "string", "format": "ipv6"}
    odd = {"type": "object", "properties": {"a": address}, "required": ["a"], "not": {"required": ["b"]}}
    for name in ("qwen3_coder", "gemma4", "hermes"):
        caplog.clear()
        writer = Writer(name, None, special=True)
        constraint = answer_constraint(
            None,
            Calls([{"type": "function", "function": {"name": f"f_{name}", "parameters": odd}}], True),
            ChatMarks(name),
            opened=False,
            special_id=writer.special_id,
        )
        assert constraint is not None
        lines = [record.message for record in caplog.records]
        assert any(f"tool f_{name}: not is not enforced" in line for line in lines)
        assert any("format" in line for line in lines) == (name != "hermes")


def test_gemma_values_match_their_schemas() -> None:
    """Nested, recursive and bounded ones, keys that need marks, and values of kinds that the schema leaves out."""
    tree = {
        "type": "object",
        "properties": {
            "leaf": {"type": "boolean"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        },
        "required": ["leaf"],
        "additionalProperties": False,
    }
    parameters = {
        "type": "object",
        "properties": {
            "a b": {"const": {"x:y": ["1", None, True]}},
            "tree": {"$ref": "#/$defs/tree"},
            "two": {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 3},
            "few": {"type": "string", "minLength": 1, "maxLength": 3},
            "word": {"enum": ["on", "off", 1, None], "type": ["string", "null"]},
            "map": {"type": "object", "additionalProperties": {"type": "number", "minimum": 2}},
            "none": {"type": "object", "additionalProperties": False},
            "open": True,
        },
        "required": ["a b", "tree", "two", "few", "word", "map", "none"],
        "additionalProperties": False,
        "$defs": {"tree": tree},
    }
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    writer, num_done = Writer("gemma4", None, True), 0
    for seed in range(8):
        constraint = answer_constraint(
            None,
            Calls(offered, True, "f", several=False),
            ChatMarks("gemma4"),
            opened=False,
            special_id=writer.special_id,
        )
        assert constraint is not None
        text = writer.written(constraint, seed, most=1000)
        if text is not None:
            ((_, arguments),) = Read(text, "gemma4", None).calls
            jsonschema.Draft202012Validator(parameters).validate(json.loads(arguments))
            num_done += 1
    assert num_done >= 4


def test_a_format_without_tools_starts_after_the_thinking() -> None:
    requested = Constraint("json_schema", '{"const": {"a": 1}}', field="response_format")
    for reasoning, special in (("qwen3", False), ("qwen3", True), ("mistral", True), ("openai_gptoss", True)):
        writer = Writer("openai" if "openai" in reasoning else "hermes", reasoning, special)
        for seed in range(8):
            opened = bool(seed % 2) and "openai" not in reasoning
            constraint = answer_constraint(
                requested, Calls(), ChatMarks(None, reasoning), opened=opened, special_id=writer.special_id
            )
            assert constraint is not None
            text = writer.written(constraint, seed)
            if text is not None:
                parser = AnswerParser(None, reasoning, reasoning_opened=opened)
                events = parser.push(text) + parser.finish()
                final = "".join(event.text for event in events if event.kind == "content")
                assert final.endswith("}")
                assert json.loads(final[final.index("{") :]) == {"a": 1}
    assert (
        answer_constraint(requested, Calls(), ChatMarks(), opened=False, special_id=lambda mark: None)
        is requested
    )
