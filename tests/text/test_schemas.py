"""Schemas of clients: their normal form, the schemas made for the grammar library, patterns of texts without quotes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from twofold.engine import grammar_source
from twofold.text.schemas.enforceable import enforceable_schema
from twofold.text.schemas.finite_patterns import texts_of
from twofold.text.schemas.normal_form import SchemaError, normal_schema
from twofold.text.schemas.text_patterns import text_patterns, whole_pattern

NORMAL: dict[str, tuple[Any, Any]] = {
    "null keywords": ({"type": None, "required": None, "properties": None, "items": None, "anyOf": None}, {}),
    "null bounds": (
        {"type": "string", "maxLength": None, "pattern": None, "format": None},
        {"type": "string"},
    ),
    "null as data": (
        {"default": None, "const": None, "enum": [None]},
        {"default": None, "const": None, "enum": [None]},
    ),
    "empty lists of choices": ({"anyOf": [], "type": [], "enum": []}, {}),
    "null in a list of types": ({"type": ["string", None]}, {"type": ["string", "null"]}),
    "properties that are no objects": (
        {"properties": {"a": True, "b": False, "c": None}},
        {"properties": {"a": {}, "b": {"not": {}}, "c": {}}},
    ),
    "notes of other types": ({"description": 5, "title": ["a"]}, {"description": "5", "title": '["a"]'}),
    "counts as floats": ({"minLength": 1.0, "maxItems": 3.0}, {"minLength": 1, "maxItems": 3}),
    "names twice": ({"required": ["a", "a"]}, {"required": ["a"]}),
    "private words": (
        {"x-guidance": {"lenient": True}, "properties": {"x-guidance": {"x-guidance": {}}}},
        {"properties": {"x-guidance": {}}},
    ),
    "unknown words": ({"strict": None, "x-y": {"z": None}}, {"strict": None, "x-y": {"z": None}}),
    "parts of parts": (
        {"$defs": {"a": {"anyOf": [{"items": {"type": None}}]}}},
        {"$defs": {"a": {"anyOf": [{"items": {}}]}}},
    ),
}


@pytest.mark.parametrize("name", NORMAL)
def test_a_schema_is_brought_into_normal_form(name: str) -> None:
    given, normal = NORMAL[name]
    assert normal_schema(given) == normal
    assert normal_schema(normal) == normal


WRONG: tuple[tuple[Any, str], ...] = (
    ({"required": "a"}, r"^required: must be a list of names \(given: \"a\"\)"),
    ({"required": ["a", 3]}, "^required: must be a list of names"),
    ({"properties": []}, "^properties: must be an object of schemas"),
    ({"properties": {"a": {"type": 5}}}, "^properties.a.type: must be a type's name"),
    ({"properties": {"a": "string"}}, "^properties.a: must be a JSON schema"),
    ({"anyOf": {}}, "^anyOf: must be a list of schemas"),
    ({"anyOf": [{"minLength": -1}]}, "^anyOf.0.minLength: must be a whole number"),
    ({"minimum": "3"}, "^minimum: must be a number"),
    ({"minimum": True}, "^minimum: must be a number"),
    ({"pattern": 5}, "^pattern: must be a text"),
    ({"enum": "a"}, "^enum: must be a list of values"),
    ({"uniqueItems": "yes"}, "^uniqueItems: must be true or false"),
    ({"items": 5}, "^items: must be a JSON schema"),
    ("object", "^must be a JSON schema"),
)


@pytest.mark.parametrize(("schema", "message"), WRONG)
def test_a_value_of_a_wrong_type_is_an_error_that_names_its_keyword(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        normal_schema(schema)


BYTES = [bytes([byte]) for byte in range(256)]
END = 256
TOKENS = grammar_source.TokenTable([*BYTES, b""], [END]).compiled([END])


def matches(schema: Any, seed: int) -> Any:
    """A value written under the schema's grammar, at random; None if it did not end in time."""
    source = grammar_source.grammar_of("json_schema", json.dumps(schema), None)
    matcher, error = grammar_source.compiled(TOKENS, source)
    assert not error, error
    chance, text = random.Random(seed), b""
    for _ in range(400):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (text, matcher.get_error())
        allowed = [token for token in range(END + 1) if mask[token // 8] >> token % 8 & 1]
        weights = [
            8.0 if token == END or chr(token) in '"}]0' else 1.0 if 32 <= token < 127 else 0.01
            for token in allowed
        ]
        (token,) = chance.choices(allowed, weights)
        if token == END:
            break
        assert matcher.consume_token(token)
        text += BYTES[token]
        if matcher.is_stopped():
            assert not matcher.is_error(), (text, matcher.get_error())
            break
    else:
        return None
    return json.loads(text)


CLOSED = {"type": "object", "additionalProperties": False}
SCORE = {
    "score": {"type": "integer", "multipleOf": 5, "maximum": 100, "minimum": 0},
    "word": {"enum": ["a", "b"]},
}
UNION = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "$defs": {
        kind: {**CLOSED, "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    },
}
ENFORCED: dict[str, Any] = {
    "a pattern over a named key": {
        **CLOSED,
        "properties": SCORE,
        "required": ["score"],
        "patternProperties": {"^score$": {"maximum": 50}},
    },
    "a pattern over all named keys": {
        **CLOSED,
        "properties": SCORE,
        "required": ["word"],
        "patternProperties": {"^(score|word)$": {}},
    },
    "a pattern over a named key and others": {
        **CLOSED,
        "properties": SCORE,
        "patternProperties": {"^scor[a-f]$": {"type": "integer", "maximum": 9}},
    },
    "a union told apart by a const": UNION,
    "a union of types": {"oneOf": [{"type": "integer", "maximum": 9}, {"enum": ["x"]}, {"type": "null"}]},
    "bounds of 64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "the largest float as a bound": {
        "type": "number",
        "minimum": -1.7976931348623157e308,
        "exclusiveMaximum": 10,
    },
    "draft 4's flags": {
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 5,
        "exclusiveMaximum": False,
    },
    "draft 7's lists of items": {
        "type": "array",
        "items": [{"enum": [1]}, {"enum": [2]}],
        "additionalItems": False,
        "minItems": 2,
    },
    "a name with a space": {"$ref": "#/$defs/a b", "$defs": {"a b": {"enum": [1]}}},
    "an unknown format": {"type": "string", "format": "phone", "maxLength": 5},
    "an unknown dialect and identifier": {"$schema": "mine", "$id": "my schema", "type": "boolean"},
    "what excludes nothing": {
        "type": "array",
        "uniqueItems": False,
        "minContains": 0,
        "items": {"enum": [1]},
        "maxItems": 2,
    },
}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_schema_made_for_the_library_ends_and_its_values_match(name: str) -> None:
    schema = ENFORCED[name]
    made = enforceable_schema(schema)
    values = [value for seed in range(12) if (value := matches(made, seed)) is not None]
    assert len(values) >= 4
    reported = schema if name != "draft 4's flags" else {"enum": [4, 5]}
    reported = reported if name != "draft 7's lists of items" else {"enum": [[1, 2]]}
    reported = {key: value for key, value in reported.items() if key not in ("$schema", "$id")}
    if name == "a name with a space":
        reported = {"enum": [1]}
    for value in values:
        jsonschema.Draft202012Validator(reported).validate(value)


UNENFORCED: tuple[tuple[Any, str], ...] = (
    ({"properties": {"a": {"not": {"type": "null"}}}}, "properties.a.not"),
    ({"if": {}, "then": {}}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"items": {"type": "file"}}, "items.type"),
    ({"$ref": "https://example.com/a.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"pattern": "(?=a)b"}, "pattern"),
    ({"pattern": r"\bword\b"}, "pattern"),
    ({"properties": {"a": {"pattern": "["}}}, "properties.a.pattern"),
    ({"pattern": "(a"}, "pattern"),
    ({**CLOSED, "patternProperties": {"^(?!a)": {}}}, "patternProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"minimum": 1e30}, "minimum"),
)


@pytest.mark.parametrize(("schema", "place"), UNENFORCED)
def test_what_cannot_be_enforced_is_named_or_left_out(schema: Any, place: str) -> None:
    with pytest.raises(SchemaError) as refused:
        enforceable_schema(schema)
    assert refused.value.place == place
    left_out: list[str] = []
    relaxed = enforceable_schema(schema, relaxed=lambda error: left_out.append(error.place))
    assert left_out == [place]
    source = grammar_source.grammar_of("json_schema", json.dumps(relaxed), None)
    assert grammar_source.compiled(TOKENS, source)[1] == ""


def test_a_schema_is_read_as_a_client_wrote_it_not_changed() -> None:
    schema = {"type": "object", "properties": SCORE, "patternProperties": {"^score$": {"maximum": 5}}}
    before = json.dumps(schema)
    enforceable_schema(schema)
    assert json.dumps(schema) == before


FINITE = {
    "^score$": ["score"], "^x_[a-c]$": ["x_a", "x_b", "x_c"], "^(?:a|bc)?d$": ["d", "ad", "bcd"], "^a$|^b$": ["a", "b"],
    "^(a|b){2}$": ["aa", "ab", "ba", "bb"], "score": None, "^a+$": None, "^a|b$": None, "^.$": None, "^a{0,999}$": None,
    r"^\d$": None, "(": None, "^((a{99}){99}){99}$": None,
}  # fmt: skip


@pytest.mark.parametrize("pattern", FINITE)
def test_texts_of_a_finite_pattern(pattern: str) -> None:
    texts = texts_of(pattern)
    assert (None if texts is None else sorted(texts)) == (FINITE[pattern] and sorted(FINITE[pattern]))


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"pattern": "^[a-z]+$"}, ["abc"], ["", "Abc", "abc "]),
        ({"pattern": "b"}, ["b", "abc", "\nb\n"], ["a"]),
        ({"pattern": "^a|b$"}, ["a", "ax", "xb"], ["xa", "bx"]),
        ({"pattern": r"^\$[0-9]+\.[0-9]{2}\$$"}, ["$1.50$"], ["1.50"]),
        ({"pattern": "^[$^|]$"}, ["$", "|"], ["a"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"format": "date"}, ["2024-02-29"], ["2024-2-9", "2024-13-01"]),
        ({"format": "date-time"}, ["2024-02-29T23:59:59Z", "2024-02-29T23:59:59.5+02:00"], ["2024-02-29"]),
        ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"format": "email"}, ["a.b@example.org"], ["a@", "a b@c"]),
        ({"format": "ipv4"}, ["255.0.10.9"], ["256.0.0.1", "1.2.3"]),
        ({"format": "duration"}, ["P1DT2H", "P3W", "PT5M"], ["P", "1D"]),
        ({"format": "uri"}, ["https://example.org/a?b=c#d"], ["example"]),
    ],
)
def test_patterns_of_texts_without_quotes(schema: Any, fitting: list[str], others: list[str]) -> None:
    patterns, left = text_patterns(schema)
    assert left == []
    for text in fitting:
        assert all(re.fullmatch(pattern, text) for pattern in patterns), text
    for text in others:
        assert not all(re.fullmatch(pattern, text) for pattern in patterns), text


def test_keywords_that_no_pattern_expresses_are_reported() -> None:
    assert text_patterns({"pattern": "(^a)", "format": "ipv6", "maxLength": 10**6}) == (
        [],
        ["maxLength", "pattern", "format"],
    )
    assert whole_pattern("a^b") is None


def test_the_trial_finds_a_grammar_that_dies() -> None:
    """The library takes this schema and fails after the last key that it allows."""
    score = {"score": {"type": "integer"}}
    schema = {**CLOSED, "properties": score, "required": ["score"], "patternProperties": {"^score$": {}}}
    source = grammar_source.grammar_of("json_schema", json.dumps(schema), None)
    assert grammar_source.compiled(TOKENS, source)[1] == ""
    known = grammar_source.TrialTokens.of([*BYTES, b""])
    assert "nothing but white space" in grammar_source.trial(TOKENS, source, known)
    made = grammar_source.grammar_of("json_schema", json.dumps(enforceable_schema(schema)), None)
    assert grammar_source.trial(TOKENS, made, known) == ""
