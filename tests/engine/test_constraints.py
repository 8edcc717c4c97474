"""Answers that must match a grammar, through the whole engine with the bundled model at temperature 1."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from twofold.api.config import EngineConfig
from twofold.api.constraints import Constraint
from twofold.api.errors import RequestError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.blocks import ops
from twofold.engine import Engine, constraints, grammar_trial
from twofold.models.bundled import bundled_model_path
from twofold.text.chat.answer_grammar import Calls, answer_constraint
from twofold.text.chat.marks import ChatMarks
from twofold.text.tokenizer import Tokenizer

from tests.engine.random_schemas import SchemaMaker

PROMPT = "Once upon a time"
WARM = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def load(**options: Any) -> Engine:
    settings: dict[str, Any] = {
        "accelerator": "none",
        "cpu_threads": 2,
        "max_num_seqs": 16,
        "max_waiting": 1000,
    }
    return Engine.load(EngineConfig(model=str(bundled_model_path()), **(settings | options)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = load()
    yield made
    made.close()


@dataclass
class Answer:
    params: SamplingParams
    constraint: Constraint | None = None
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def end(self) -> str | None:
        return self.chunks[-1].error or self.chunks[-1].finish_reason


def answered(engine: Engine, answers: list[Answer]) -> list[Answer]:
    """All of them in one batch."""
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    for number, answer in enumerate(answers):
        compiled = None if answer.constraint is None else engine.compile(answer.constraint)
        engine.submit(
            GenerationRequest(prompt, answer.params, answer.chunks.append, str(number), constraint=compiled)
        )
    while engine.step():
        pass
    return answers


FORMATS = jsonschema.FormatChecker()
# The library's own takes neither RFC 3339's small z nor more than six digits of a second.
FORMATS.checks("time")(re.compile(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)").fullmatch)


def is_json(schema: Any) -> Any:
    check = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return lambda text: check.is_valid(json.loads(text))


KINDS = {
    "a schema": (Constraint("json_schema", PERSON), is_json(json.loads(PERSON))),
    "a schema without whitespace": (
        Constraint("json_schema", PERSON, whitespace_pattern=""),
        re.compile(r'\{"name":"[^"]*","age":\d+\}').fullmatch,
    ),
    "whitespace of one kind": (
        Constraint("json_schema", '{"const": [1, 2]}', whitespace_pattern="~"),
        re.compile("~?".join(["\\[", "1", ",", "2", "\\]"])).fullmatch,
    ),
    "a regex": (Constraint("regex", "[a-z]{3,5}/[0-9]{2}"), re.compile("[a-z]{3,5}/[0-9]{2}").fullmatch),
    "choices": (Constraint("choice", '["yes", "no \\"so\\"", "日本 😀"]'), {"yes", 'no "so"', "日本 😀"}.__contains__),
    "one choice begins another": (Constraint("choice", '["tell", "tell me"]'), {"tell", "tell me"}.__contains__),
    "left recursion that ends": (
        Constraint("grammar", 'start: start "a" | "b" // comment "\nx: x'), re.compile("ba*").fullmatch,
    ),
    "a grammar": (
        Constraint("grammar", 'start: "<" word ">"\nword: /[a-z]{2,4}/'), re.compile("<[a-z]{2,4}>").fullmatch,
    ),
    "a special token's name as text": (Constraint("choice", '["<|im_end|>x"]'), "<|im_end|>x".__eq__),
    "in a frame": (
        Constraint("regex", "[0-9]{3}", frame='start: before @answer\nbefore[lazy]: /(?s:.*)/ " the"'),
        re.compile("(?s)(?:(?! the).)* the[0-9]{3}").fullmatch,
    ),
    "something else in a frame": (
        Constraint("json_schema", PERSON, frame='start: @answer | "<" /[a-z]{2}/ ">"'),
        lambda text: re.fullmatch("<[a-z]{2}>", text) or is_json(json.loads(PERSON))(text),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_answer_matches(engine: Engine, name: str) -> None:
    """Whatever else is asked: penalties, biases, no end token before so many, no end token at all."""
    constraint, matches = KINDS[name]
    also: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 0.0}, {"ignore_eos": True}, {"min_tokens": 20}, {"repetition_penalty": 1.5, "top_p": 0.9},
        {"logit_bias": tuple((token, 90.0) for token in (0, 2, 70)), "top_k": 3, "logprobs": 5},
    )  # fmt: skip
    params = [replace(WARM, max_tokens=200, seed=seed, **more) for seed in range(3) for more in also]
    done = 0
    for answer in answered(engine, [Answer(each, constraint) for each in params]):
        assert answer.end in ("stop", "length"), answer
        if answer.end == "stop":
            assert matches(answer.text), answer.text
            done += 1
    assert done >= len(params) // 2


CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2500)} | {"a2500": {"type": "integer"}}
REFUSED = {
    "unsatisfiable": ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "no such type": ("json_schema", {"type": "strnig"}, "'strnig' is no type"),
    "a keyword that is not supported": ("json_schema", {"not": {"type": "integer"}}, "not: this keyword"),
    "nor by asking for leniency": (
        "json_schema", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems",
    ),
    "nor inside of Lark": (
        "grammar", 'start: %json {"contains": {}, "x-guidance": {"lenient": true}}', "contains",
    ),
    "another document": ("json_schema", {"$ref": "http://127.0.0.1/x.json"}, "outside the schema"),
    "only itself": ("json_schema", {"$ref": "#"}, "endless"),
    "false": ("json_schema", False, "expected a JSON object"),
    "no JSON": ("json_schema", "{", "JSON"),
    "too many states at the first step": (
        "json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}, "max is",
    ),
    "deeper than the stack": ("json_schema", {"$ref": "#/$defs/a0", "$defs": CHAIN}, "too deeply"),
    "too deep": ("json_schema", "[" * 3000 + "]" * 3000, "deep"),
    "too deep, well-formed": ("json_schema", '{"items":' * 60 + "{}" + "}" * 60, "60 levels"),
    "too large": ("regex", "a" * 200_000, "200000 bytes"),
    "compiled for ever": ("json_schema", {"type": "integer", "multipleOf": 9_999_991}, "takes longer"),
    "look-ahead": ("regex", "(?=a)b", "look-around"),
    "nothing": ("regex", r"[^\s\S]", "no text can match"),
    "an empty text": ("grammar", "", "empty"),
    "no Lark": ("grammar", "start: (", "Expected"),
    "a rule of nothing but itself": ("grammar", "start: start", "endless"),
    "a rule behind which it comes again": ("grammar", 'start: "a" (start | b)\nb: /x|y/ start', "endless"),
    "left recursion that ends nowhere": ("grammar", 'start: x "b"\nx: x "a"', "endless"),
    "an endless schema in Lark": (
        "grammar", 'start: "<" %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1} ">"', "endless",
    ),
    "an object that must hold itself": (
        "json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "endless",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where the compiler crashes or hangs; the next grammar compiles normally."""
    kind, what, reason = REFUSED[name]
    engine.compile(Constraint("choice", '["the process is there"]'))
    monkeypatch.setattr(grammar_trial, "TIMEOUT_S", 2.0)
    text = what if isinstance(what, str) else json.dumps(what)
    with pytest.raises(RequestError, match=reason) as refusal:
        engine.compile(Constraint(kind, text, field="response_format"))  # type: ignore[arg-type]
    assert refusal.value.param == "response_format"
    assert len(str(refusal.value)) < 600
    engine.compile(Constraint("choice", json.dumps([name])))


def test_batches_preemption_and_neighbours_change_no_token(engine: Engine) -> None:
    after = 'start: before @answer\nbefore[lazy]: /(?s:.*)/ " the"'
    free = [
        replace(WARM, temperature=0.0, max_tokens=30),
        replace(WARM, max_tokens=30, seed=5, frequency_penalty=0.5, stop=(" and",)),
        replace(WARM, max_tokens=30, seed=6, top_k=9, logit_bias=((300, 3.0),), min_tokens=9, logprobs=2),
    ]
    bound = [
        Answer(replace(WARM, seed=7), Constraint("json_schema", PERSON)),
        Answer(replace(WARM, seed=8), Constraint("json_schema", PERSON)),
        Answer(replace(WARM, seed=9, presence_penalty=1.0), Constraint("regex", "[a-z ]{40,80}")),
        Answer(replace(WARM, seed=9, stop=(" a",), logprobs=3), Constraint("regex", "[a-z ]{40,80}")),
        Answer(replace(WARM, seed=4), Constraint("regex", "[0-9 ]{30}", frame=after)),
    ]
    requested = [*map(Answer, free), *bound]
    alone = [answered(engine, [replace(each, chunks=[])])[0] for each in requested]
    assert [each.end for each in alone].count("stop") >= 5
    small = load(max_total_tokens=144, page_size=4, max_num_batched_tokens=24)
    for where in (engine, small):
        together = answered(where, [replace(each, chunks=[]) for each in requested])
        for one, other in zip(alone, together, strict=True):
            assert (one.tokens, one.text, one.end) == (other.tokens, other.text, other.end)
            assert [c.logprobs for c in one.chunks if c.logprobs] == [
                c.logprobs for c in other.chunks if c.logprobs
            ]
    assert small.stats().num_free_pages == small.stats().num_pages
    small.close()


def test_log_probabilities_are_of_allowed_tokens(engine: Engine) -> None:
    choices = Constraint("choice", '["aa", "ab", "c"]')
    for answer in answered(engine, [Answer(replace(WARM, seed=s, logprobs=20), choices) for s in range(6)]):
        for entry in (each for chunk in answer.chunks for each in chunk.logprobs):
            assert np.exp([value for _, value in entry.top]).sum() == pytest.approx(1.0)
            assert dict(entry.top)[entry.token_id] == entry.logprob


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder"])
def test_an_error_names_the_tool_and_holds_no_grammar(engine: Engine, dialect: str) -> None:
    schemas = {
        "fine": {"type": "object", "properties": {"a": {"type": "string"}}},
        "broken": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
            "required": ["a"],
        },
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas
    ]
    constraint = answer_constraint(
        None, Calls(tools, True), ChatMarks(dialect), opened=False, special_id=lambda mark: None
    )
    assert constraint is not None
    with pytest.raises(RequestError) as refused:
        engine.compile(constraint)
    assert str(refused.value).startswith("tools: broken: the schema cannot be used: ")
    assert "required property 'a'" in str(refused.value)
    assert "start:" not in str(refused.value)


def test_an_answer_without_allowed_tokens_is_cut_off(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A word that must not come is all that may; the other answers of the step end as usual."""
    banned = tuple(
        (token,) for token in range(engine.vocab_size) if engine.tokenizer.token_bytes(token)[:1] == b"c"
    )
    requested = [
        Answer(replace(WARM, bad_words=banned), Constraint("choice", '["cat"]')),
        Answer(WARM, Constraint("choice", '["dog"]')),
    ]
    failed, fine = answered(engine, requested)
    assert (failed.text, failed.end) == ("", "length")
    (line,) = [record.message for record in caplog.records if "ended early" in record.message]
    assert "the answer cannot continue under constraint" in line
    assert (fine.text, fine.end) == ("dog", "stop")


def test_a_mask_that_does_not_come_is_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, fill = threading.Event(), constraints.fill
    count = 0

    def slow(matcher: Any, mask: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            stuck.wait(60)
        fill(matcher, mask)

    requested = [Answer(replace(WARM, seed=s, top_p=0.99), Constraint("regex", "[a-z]{9}")) for s in range(3)]
    engine.compile(requested[0].constraint)  # type: ignore[arg-type]
    monkeypatch.setattr(constraints, "fill", slow)
    monkeypatch.setattr(constraints, "MASK_TIMEOUT_S", 2.0)
    monkeypatch.setattr(constraints, "_OFFLOAD_ABOVE_S", 0.0)
    first, second, third = answered(engine, requested)
    stuck.set()
    assert [first.end, second.end, third.end] == ["stop", "length", "stop"]
    assert "s to compute; simplify" in caplog.text


@pytest.mark.parametrize("size", [1, 31, 32, 33, 4096, 5000])
def test_masked_logits_are_those_whose_bit_is_set(size: int) -> None:
    random = np.random.default_rng(size)
    logits = random.standard_normal((5, size), np.float32)
    expected = logits.copy()
    allowed = random.random((3, size)) < np.array([[0.01], [0.5], [0.99]])
    allowed[2, : size // 2] = True
    for row, bits in zip((0, 2, 4), allowed, strict=True):
        expected[row, ~bits] = -np.inf
    padded = np.zeros((3, -(-size // 32) * 32), np.uint8)
    padded[:, :size] = allowed
    masks = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    ops.mask_logits(ops.ThreadPool(2), logits, [0, 2, 4], list(masks))
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_random_schemas_hold(engine: Engine, count: int) -> None:
    """Every answer that is not cut off by its length is valid, and few are cut off."""
    maker = SchemaMaker(1)
    schemas = [maker.make() for _ in range(count)]
    params = [replace(WARM, seed=seed, max_tokens=160 if count < 100 else 400) for seed in range(count)]
    requested = [
        Answer(each, Constraint("json_schema", json.dumps(schema)))
        for each, schema in zip(params, schemas, strict=True)
    ]
    wrong, num_cut = [], 0
    for schema, answer in zip(schemas, answered(engine, requested), strict=True):
        if answer.end == "length":
            num_cut += 1
        elif answer.end != "stop" or not is_json(schema)(answer.text):
            wrong.append((schema, answer.text, answer.end))
    assert not wrong, (len(wrong), wrong[:3])
    print(f"{count} schemas: {count - num_cut} valid, {num_cut} cut off")
    assert num_cut < count // 3


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [
        "plain words",
        " a space first",
        "naïve 日本 😀",
        '{"a": [1, 2.5]}',
        "<|im_end|>",
        "\n\ttabs",
        "x",
    ]


@pytest.mark.parametrize(
    "kind", ["bundled", "sentencepiece", "half its columns have no token", "no end token"]
)
def test_a_vocabulary_is_its_tokens_bytes(tmp_path: Path, texts: list[str], kind: str) -> None:
    """The grammar of a text accepts the tokenizer's tokens for it, and no special token."""
    tokenizer = _tokenizer(kind, tmp_path)
    vocab_size = tokenizer.vocab_size * (2 if "columns" in kind else 1)
    compiler = constraints.GrammarCompiler(tokenizer, vocab_size)
    for text in texts:
        matcher = compiler.compile(Constraint("choice", json.dumps([text, text + "!"]))).start()
        tokens, pieces = tokenizer.encode(text), [tokenizer.token_bytes(token) for token in range(vocab_size)]
        if b"".join(
            pieces[token] for token in tokens
        ) != text.encode() or not tokenizer.special_token_ids.isdisjoint(
            tokens
        ):  # a space that SentencePiece adds, a special token's name
            tokens = [pieces.index(bytes([byte])) for byte in text.encode()]
        for token in tokens:
            mask = matcher.mask()
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
            assert token in allowed
            assert not tokenizer.special_token_ids & set(allowed.tolist())
            assert all(tokenizer.token_bytes(other) for other in allowed)
            matcher.take(token)
            assert matcher.error is None
        mask = matcher.mask()
        assert mask is not None
        for token in tokenizer.eos_token_ids:
            assert mask[token // 32] >> token % 32 & 1, "it may end here"
        assert not matcher.ended
    compiler.close()


def _tokenizer(kind: str, directory: Path) -> Tokenizer:
    if kind == "sentencepiece":
        pieces = [
            "<unk>",
            "<|im_end|>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            *"adinoprstwx1",
            "▁a",
            "é",
        ]
        backend = tokenizers.Tokenizer(
            models.BPE({piece: at for at, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        spaces = decoders.Replace("▁", " ")
        backend.decoder = decoders.Sequence(
            [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)])
        backend.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        return Tokenizer.load(directory)
    tokenizer = Tokenizer.load(bundled_model_path())
    if kind == "no end token":
        tokenizer.eos_token_ids = frozenset()
    return tokenizer
