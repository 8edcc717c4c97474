"""What a client writes is text, even where it reads like a control token: "<|im_end|>" in a message ends no turn.

Before a chat template runs, each control token's text inside the messages gets a mark behind its first character; the
rendered prompt is cleaned of marks and remembers where they were. What the template itself wrote stays a control token.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import tokenizers

from twofold.api.errors import RequestError

_MARKS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters: no text has one, and of 32 at least one is in no text that wants to break this."""


class PromptText(str):
    """A rendered prompt. Equal to its text; `Tokenizer.encode` reads `literal` too."""

    literal: frozenset[int]
    """Offsets at which the text of a control token begins that is none."""

    def __new__(cls, text: str, literal: frozenset[int] = frozenset()) -> PromptText:
        prompt = super().__new__(cls, text)
        prompt.literal = literal
        return prompt


class ControlTokens:
    """The control tokens of one tokenizer, as they are found in text: of several that begin alike the longest."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._added = list(added.values())
        # Some vocabularies put a space before a prompt's first word only.
        scheme = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer is not None else b""
        self._first_differs = b'"prepend_scheme":"first"' in scheme
        self._tokens = sorted(
            ((token_id, token) for token_id, token in added.items() if token.special and token.content),
            key=lambda item: len(item[1].content),
            reverse=True,
        )

    # 800 tokens, as DeepSeek has them, take 0.05 s to compile: once a conversation asks.
    @functools.cached_property
    def _alone(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token.content) for _, token in self._tokens) or r"(?!)")

    @functools.cached_property
    def _as_found(self) -> re.Pattern[str]:
        """With the spaces that some tokens take along; a group's name is its token's id."""
        patterns = []
        for token_id, token in self._tokens:
            before, behind = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
            patterns.append(f"{before}(?P<_{token_id}>{re.escape(token.content)}){behind}")
        return re.compile("|".join(patterns) or r"(?!)")

    @functools.cached_property
    def _cuts(self) -> re.Pattern[str]:
        """All that is found in a text before anything else is done with it; a group: what is behind it stands alone."""
        # What a token takes of the spaces beside it is not another's, so those that take some behind are no end.
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

    def stretches(self, text: str) -> list[str]:
        """See `Tokenizer.stretches`."""
        parts, begin = [], 0
        for match in self._cuts.finditer(text):
            if match.lastindex is not None:
                parts.append(text[begin : match.end()])
                begin = match.end()
        return [*parts, text[begin:]] if begin < len(text) or not parts else parts

    def render(
        self, render: Callable[[Sequence[Mapping[str, Any]], Any, Mapping[str, Any]], str], *client: Any
    ) -> PromptText:
        """What `render` makes of (messages, tools, variables), `client`, with every control token in them as text."""
        if not self._occurs_in(client):
            return PromptText(render(*client))
        mark = next((mark for mark in _MARKS if not _any_text(client, _has_mark(mark))), None)
        if mark is None:
            raise RequestError(
                "the messages hold control tokens and every Unicode noncharacter from U+FDD0 to U+FDEF; leave one out",
                param="messages",
            )
        shield = self._alone.sub
        marked = _map_text(client, lambda text: shield(lambda m: f"{m[0][0]}{mark}{m[0][1:]}", text))
        # A template that writes JSON in ASCII has escaped it.
        pieces = re.split(f"{mark}|{re.escape(_escaped(mark))}", render(*marked))
        literal, length = set(), 0
        for piece in pieces[:-1]:
            length += len(piece)
            literal.add(length - 1)
        return PromptText("".join(pieces), frozenset(literal))

    def split(self, prompt: PromptText) -> list[str | int]:
        """Stretches of text without control tokens, and the ids of those between them."""
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
    """Whether `test` is true of any string in JSON-like data."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, Mapping):
        return any(_any_text(each, test) for pair in value.items() for each in pair)
    return isinstance(value, (list, tuple)) and any(_any_text(each, test) for each in value)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """JSON-like data with every string, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(key, change): _map_text(each, change) for key, each in value.items()}
    return [_map_text(each, change) for each in value] if isinstance(value, (list, tuple)) else value
