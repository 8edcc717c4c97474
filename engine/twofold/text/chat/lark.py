"""Builds rules in llguidance's Lark from strings, marks and JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

_WHITESPACE: Final = r"[ \t]|\r?\n[ \t]{0,64}"
"""White space between JSON tokens, as in a `response_format`; bounded, so that a model cannot write it for ever."""
ANY_TEXT: Final = "/(?s:.*)/"


class Lark:
    """A grammar built rule by rule. Methods return an expression for use in a rule or in another call."""

    def __init__(self, marks: Iterable[str], special_id: Callable[[str], int | None]) -> None:
        """
        Args:
            marks: strings that may be special tokens.
            special_id: the id of a special token, which is not text; None: the mark is text.
        """
        ids = ((mark, special_id(mark)) for mark in dict.fromkeys(marks))
        self._ids = {mark: token for mark, token in ids if token is not None}
        longest = sorted(self._ids, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None
        self._rules: list[str] = []
        self._names: dict[str, str] = {}

    def is_token(self, mark: str) -> bool:
        """Whether the mark is a special token, which free text cannot contain."""
        return mark in self._ids

    def text(self, text: str) -> str:
        """Exactly `text`, including its marks."""
        parts = self._marks.split(text) if self._marks is not None else [text]
        return " ".join(self._part(part) for part in parts if part) or '""'

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; equal bodies share one rule."""
        return self._named("r", body, options)

    def terminal(self, body: str) -> str:
        """One lexeme: strings and regular expressions, without marks that are special tokens."""
        return self._named("T", body)

    def named(self, name: str, body: str) -> str:
        """Add a rule under a name that may be used before."""
        self._rules.append(f"{name}: {body}")
        return name

    def new_name(self, prefix: str) -> str:
        """A new name for `named`."""
        name = f"{prefix}_{len(self._names)}"
        self._names[name] = name
        return name

    def any_of(self, choices: Iterable[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(choices)))

    def up_to(self, end: str, text: str = ANY_TEXT) -> str:
        """Free text (an expression of one lexeme) up to and including the next `end`."""
        if self._marks is not None and (match := self._marks.match(end)) and match[0] == end:
            return f"{self.terminal(text)} {self.text(end)}"
        return self.rule(f"{self.terminal(text)} {json.dumps(end)}", "[lazy]")

    def json(self, schema: Mapping[str, Any], **more: Any) -> str:
        """JSON of a schema. more: llguidance's options."""
        options = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False, **more}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str = "") -> str:
        """Items in this order; optional ones may be missing. The first item that is present has no separator before
        it."""
        between = f"{self.text(separator)} " if separator else ""
        after, start = '""', '""'
        for item, required in reversed(items):
            with_it, first = f"{between}{item} {after}", f"{item} {after}"
            start = self.rule(first if required else f"{first} | {start}")
            after = self.rule(with_it if required else f"{with_it} | {after}")
        return start

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _part(self, part: str) -> str:
        return f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)

    def _named(self, prefix: str, body: str, options: str = "") -> str:
        key = f"{options}: {body}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{prefix}{len(self._names)}"
            self._rules.append(f"{name}{key}")
        return name


def without(excluded: Iterable[str]) -> str:
    """A free-text expression that excludes full matches of these regular expressions."""
    return " & ".join([ANY_TEXT, *(f"~/{each}/" for each in excluded)])


def escaped(text: str) -> str:
    """`text` escaped for a regular expression between slashes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/&~#-])", r"\\\1", text)


def in_slashes(pattern: str) -> str:
    """A regular expression as it is written between slashes."""
    return re.sub(r"\\.|/", lambda part: r"\/" if part[0] == "/" else part[0], pattern, flags=re.DOTALL)
