"""Translates a constraint for llguidance: its grammar, its limits, the model's tokens.

Also runs as a separate process that tries every grammar before the server compiles it. A regular expression that takes
minutes, or a schema nested so deeply that the stack overflows, then costs only that process. This module therefore
imports no other Twofold module, and both sides build the same objects from the same functions.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import llguidance

JSON_WHITESPACE: Final = r"[ \t]|\r?\n[ \t]{0,64}"
"""Whitespace between JSON tokens; bounded, or a model may write whitespace for ever."""
_TRIAL_WALKS: Final = 6
_TRIAL_STEPS: Final = 64
_TRIAL_S: Final = 1.0
_MAX_WHITE: Final = 24
"""Steps of nothing but white space after which a match counts as stuck."""
_CLOSING: Final = tuple(b'"}],:0')
"""Bytes that lead through a grammar's structure; texts, which chance would seldom leave, end with one."""
_ALLOWED: Final = re.compile(rb"[^\0]")
_TRIAL_STACK_BYTES: Final = 4 * 1024 * 1024
"""Half the stack of the server's threads, so a grammar that passes here has room there."""
_TRIAL_MEMORY_BYTES: Final = 3 * 1024**3
_MAX_MESSAGE: Final = 400
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
"""Every tokenisation of forced text stays allowed: the model decides, and no tokenizer is called."""


class TokenTable:
    """A vocabulary in llguidance's form: the bytes of each token; special tokens are not text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        """A token without bytes is never allowed."""
        self.tokens = list(tokens)
        self.special_token_ids = list(special)
        self.eos_token_id = 0

    def __call__(self, text: bytes) -> list[int]:
        """Tokenises forced text. Required by llguidance, but unused with `no_forcing`."""
        return []

    def compiled(self, eos: Sequence[int]) -> llguidance.LLTokenizer:
        """eos: the tokens that end an answer, at least one."""
        self.eos_token_id = eos[0]
        return llguidance.LLTokenizer(self, eos_token=list(eos))  # type: ignore[arg-type]


def limits() -> llguidance.LLParserLimits:
    """Limits of one grammar's memory and of one mask's time (15 ms at most)."""
    return llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def grammar_of(kind: str, text: str, whitespace_pattern: str | None, frame: str | None = None) -> str:
    """The grammar in llguidance's form. For the fields see `api.constraints.Constraint`.

    Raises:
        ValueError: invalid JSON, or a schema that is not an object.
    """
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the schema is no JSON: {error}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {text[:40]}; expected a JSON object")
        options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
        if whitespace_pattern == "":
            options["whitespace_flexible"] = False
        else:
            options["whitespace_pattern"] = whitespace_pattern or JSON_WHITESPACE
        answer: dict[str, Any] = {"json_schema": {**schema, "x-guidance": options}}
    elif kind == "regex":
        answer = json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
    elif kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        answer = {"lark_grammar": f"start: {choices}"}
    else:
        answer = {"lark_grammar": text}
    start = _OPTIONS + (frame or "start: @answer")
    return json.dumps({"grammars": [{"lark_grammar": start}, {**answer, "name": "answer"}]})


def compiled(tokens: llguidance.LLTokenizer, grammar: str) -> tuple[llguidance.LLMatcher, str]:
    """The matcher at its initial state, and why it cannot be used ("" if it can)."""
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        return matcher, one_line(matcher.get_error())
    warnings = matcher.get_grammar_warnings()
    # What a warning names is missing from the grammar.
    return matcher, one_line("; ".join(warnings)) if warnings else ""


def one_line(error: str) -> str:
    """llguidance's error message on one line."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    if text == "NoExtensionBias":
        return "no text can match it"
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"


class TrialTokens(NamedTuple):
    """Tokens by what they do in `trial`."""

    closing: list[int]
    """Tokens that are one byte of `_CLOSING`."""
    text: int
    """Bit mask of the tokens that are not only white space."""

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> TrialTokens:
        """tokens: the bytes of each token."""
        closing = [number for number, text in enumerate(tokens) if len(text) == 1 and text[0] in _CLOSING]
        bits = bytearray(-(-len(tokens) // 8) + 1)
        for number, text in enumerate(tokens):
            if not text or text.strip():
                bits[number // 8] |= 1 << number % 8
        return cls(closing, int.from_bytes(bits, "little"))


def trial(tokens: llguidance.LLTokenizer, grammar: str, known: TrialTokens) -> str:
    """Why a grammar cannot be used. Compiles it and generates short matches to find out."""
    initial, error = compiled(tokens, grammar)
    until = time.monotonic() + _TRIAL_S
    for number in range(_TRIAL_WALKS):
        if error or time.monotonic() > until:
            break
        error = _walk(initial.deep_copy(), random.Random(number), known, until)  # noqa: S311
    return error


def _walk(matcher: llguidance.LLMatcher, chance: random.Random, known: TrialTokens, until: float) -> str:
    """Why a match cannot be continued; "" if it ends, or does not end in time."""
    num_white = 0
    for _ in range(_TRIAL_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        text = int.from_bytes(mask, "little") & known.text
        num_white = 0 if text else num_white + 1
        if num_white > _MAX_WHITE:
            return "after some texts nothing but white space can follow"
        closing = [token for token in known.closing if mask[token // 8] >> token % 8 & 1]
        if closing and chance.random() < 0.5:
            token = chance.choice(closing)
        else:
            token = _any_of(text.to_bytes(len(mask), "little") if text else mask, chance)
        if not matcher.consume_token(token) or matcher.is_stopped() or time.monotonic() > until:
            break
    return one_line(matcher.get_error()) if matcher.is_error() else ""


def _any_of(mask: bytes, chance: random.Random) -> int:
    """A random token of a mask that has one."""
    found = _ALLOWED.search(mask, chance.randrange(len(mask))) or _ALLOWED.search(mask)
    assert found is not None
    byte = mask[found.start()]
    return found.start() * 8 + chance.choice([bit for bit in range(8) if byte >> bit & 1])


def _serve() -> None:
    """Read the vocabulary, then grammars, one per line; answer each with its error."""
    resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_MEMORY_BYTES, _TRIAL_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = json.loads(sys.stdin.readline())
    table = TokenTable([b64decode(token) for token in vocabulary["tokens"]], vocabulary["special"])
    tokens = table.compiled(vocabulary["eos"])
    known = TrialTokens.of(table.tokens)
    for line in sys.stdin:
        error = trial(tokens, json.loads(line), known)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    threading.stack_size(_TRIAL_STACK_BYTES)
    with contextlib.suppress(KeyboardInterrupt):
        worker = threading.Thread(target=_serve)
        worker.start()
        worker.join()
