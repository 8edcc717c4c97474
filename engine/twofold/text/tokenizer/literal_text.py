"""Encodes clients' text as text, even if it looks like a control token: "<|im_end|>" in a message ends no turn.

Before a chat template runs, a marker is inserted after the first character of each control token's text in the
messages. The markers are removed from the rendered prompt and their offsets kept. The template's own have none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import tokenizers

from twofold.api.errors import RequestError

_MARKS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters: no valid text has one; with 32 of them, at least one is unused even in hostile text."""


class PromptText(str):
    """A rendered prompt. Equal to its text; `Tokenizer.encode` also reads `literal`."""

    literal: frozenset[int]
    """Offsets of control-token text that is to be encoded as text."""

    def __new__(cls, text: str, literal: frozenset[int] = frozenset()) -> PromptText:
        prompt = super().__new__(cls, text)
        prompt.literal = literal
        return prompt


class ControlTokens:
    """The control tokens of one tokenizer, matched in text: the longest of several with a common prefix."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._added = list(added.values())
        # Some vocabularies put a space only before a prompt's first word.
        scheme = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer is not None else b""
        self._first_differs = b'"prepend_scheme":"first"' in scheme
        self._tokens = sorted(
            ((token_id, token) for token_id, token in added.items() if token.special and token.content),
            key=lambda item: len(item[1].content),
            reverse=True,
        )

    # Compiling takes 0.05 s for 800 tokens, as in DeepSeek: done when a conversation first needs it.
    @functools.cached_property
    def _alone(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token.content) for _, token in self._tokens) or r"(?!)")

    @functools.cached_property
    def _as_found(self) -> re.Pattern[str]:
        """Pattern with the adjacent spaces that some tokens absorb; a group's name is its token's id."""
        patterns = []
        for token_id, token in self._tokens:
            before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
            patterns.append(f"{before}(?P<_{token_id}>{re.escape(token.content)}){after}")
        return re.compile("|".join(patterns) or r"(?!)")

    @functools.cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Pattern of all tokens matched before other processing; in a group: text after it is independent of it."""
        # Spaces absorbed by one token are not available to the next, so a token that absorbs spaces after it is no cut.
        found = sorted(
            (token for token in self._added if not token.normalized and token.content),
            key=lambda token: len(token.content),
            reverse=True,
        )
        if self._first_differs or any(token.single_word for token in self._added):
            found = []
        return re.compile(
            "|".join(
                f"({re.escape(token.content)})"
                if token.special and not token.rstrip
                else re.escape(token.content)
                for token in found
            )
            or r"(?!)"
        )

    def first(self, text: str) -> str | None:
        """The control token at the start of `text`; None: there is none."""
        match = self._alone.match(text)
        return None if match is None else match[0]

    def segments(self, text: str) -> list[str]:
        """See `Tokenizer.segments`."""
        parts, begin = [], 0
        for match in self._cuts.finditer(text):
            if match.lastindex is not None:
                parts.append(text[begin : match.end()])
                begin = match.end()
        return [*parts, text[begin:]] if begin < len(text) or not parts else parts

    def render(self, render: Callable[..., str], *client: Any) -> PromptText:
        """`render`'s prompt for (messages, tools, variables) in `client`, with every control token in them as text."""
        if not self._occurs_in(client):
            return PromptText(render(*client))
        mark = next((mark for mark in _MARKS if not _any_text(client, _has_mark(mark))), None)
        if mark is None:
            raise RequestError(
                "the messages hold control tokens and every Unicode noncharacter from U+FDD0 to U+FDEF; leave one out",
                param="messages",
            )
        replace = self._alone.sub
        marked = _map_text(client, lambda text: replace(lambda m: f"{m[0][0]}{mark}{m[0][1:]}", text))
        # A template that writes JSON in ASCII has escaped the marker.
        pieces = re.split(f"{mark}|{re.escape(_escaped(mark))}", render(*marked))
        literal, length = set(), 0
        for piece in pieces[:-1]:
            length += len(piece)
            literal.add(length - 1)
        return PromptText("".join(pieces), frozenset(literal))

    def split(self, prompt: PromptText) -> list[str | int]:
        """Parts of text without control tokens, and the ids of the control tokens between them."""
        parts: list[str | int] = []
        begin = at = 0
        while match := self._as_found.search(prompt, at):
            name = str(match.lastgroup)
            if match.start(name) in prompt.literal:
                at = match.start(name) + 1
                continue
            parts += [prompt[begin : match.start()], int(name[1:])]
            begin = at = match.end()
        return [*parts, prompt[begin:]]

    def _occurs_in(self, client: Any) -> bool:
        return _any_text(client, lambda text: self._alone.search(text) is not None)


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _has_mark(mark: str) -> Callable[[str], bool]:
    return lambda text: mark in text or _escaped(mark) in text


def _any_text(value: Any, test: Callable[[str], bool]) -> bool:
    """Whether `test` holds for any string in JSON-like data."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, Mapping):
        return any(_any_text(each, test) for pair in value.items() for each in pair)
    return isinstance(value, (list, tuple)) and any(_any_text(each, test) for each in value)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """JSON-like data with `change` applied to every string, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(key, change): _map_text(each, change) for key, each in value.items()}
    return [_map_text(each, change) for each in value] if isinstance(value, (list, tuple)) else value
