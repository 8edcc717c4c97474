"""Steps and value sizes of one rendering of a chat template, both bounded.

A step is one node of the template, one element of a value or 32 bytes of text. Steps are counted and not timed, so that
a template passes or fails alike on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any, Final, NamedTuple

import jinja2.utils

MAX_STEPS: Final = 20_000_000
"""Steps of one rendering: some seconds. Most published templates take 100 for a message."""
_MAX_PAIR_STEPS: Final = 100_000_000
"""Most further steps for templates that look at all later messages for each message, as gpt-oss does."""
MAX_VALUE_CHARS: Final = 16 * 1024 * 1024
"""Characters of one text, or elements of one list, that a template may make."""
_MAX_ELEMENTS: Final = 1 << 18
"""Elements, with those inside them, of a value that one operation visits: it holds the interpreter lock meanwhile."""
_MAX_LEVELS: Final = 256
"""Nesting of such a value; a request's JSON has less."""
CALL_STEPS: Final = 8
"""Steps of a call, besides those of its arguments."""
_BYTES_PER_STEP_LOG2: Final = 5


class TemplateLimitError(Exception):
    """A template exceeds a limit. The message names the limit."""


def steps_of(num_messages: int) -> int:
    """Steps of one rendering of so many messages."""
    return MAX_STEPS + min(num_messages * num_messages, _MAX_PAIR_STEPS)


class ValueSize(NamedTuple):
    """Size of a value with everything inside it; an object that occurs twice counts twice."""

    elements: int
    chars: int
    levels: int


class Budget:
    """Steps left to one rendering. Every method raises TemplateLimitError once they are spent."""

    __slots__ = ("_limit", "_remaining")

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._remaining = self._limit = max_steps

    def spend(self, steps: int) -> None:
        self._remaining -= steps
        if self._remaining < 0:
            raise TemplateLimitError(f"it takes more than {self._limit} steps")

    def made(self, value: Any) -> Any:
        """`value`, after counting the text or list that an operation has made."""
        if isinstance(value, str):
            self.spend(sys.getsizeof(value) >> _BYTES_PER_STEP_LOG2)
            allow(len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(len(value) >> 2)
            allow(len(value))
        return value

    def counted(self, items: Iterable[Any], steps: int) -> Iterator[Any]:
        """`items`, each of which takes `steps`."""
        for item in items:
            self.spend(steps)
            yield item

    def measure(self, value: Any) -> ValueSize:
        """The size of a value that an operation is about to visit."""
        if isinstance(value, str):
            self.spend(sys.getsizeof(value) >> _BYTES_PER_STEP_LOG2)
            return ValueSize(1, len(value), 1)
        if value is None or isinstance(value, int | float):
            return ValueSize(1, _chars(value), 1)
        elements = chars = levels = 0
        level = [value]
        while level:
            levels += 1
            elements += len(level)
            if levels > _MAX_LEVELS:
                raise TemplateLimitError(f"it uses a value nested deeper than {_MAX_LEVELS} levels")
            inner: list[Any] = []
            for each in level:
                if type(each) is str:
                    chars += len(each)
                    continue
                chars += _chars(each)
                held = _held(each)
                if elements + len(inner) + len(held) > _MAX_ELEMENTS:
                    raise TemplateLimitError(f"it uses a value of more than {_MAX_ELEMENTS} elements at once")
                inner += held
            self.spend(2 * len(level))
            level = inner
        self.spend(chars >> _BYTES_PER_STEP_LOG2)
        return ValueSize(elements, chars, levels)


def allow(size: int) -> None:
    """TemplateLimitError if a value of so many characters or elements is too large."""
    if size > MAX_VALUE_CHARS:
        raise TemplateLimitError(f"it makes a value of more than {MAX_VALUE_CHARS} characters or elements")


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    # Digits of a number, and the letters of None and its like.
    return 24 + (value.bit_length() >> 1) if isinstance(value, int) else 24


def _held(value: Any) -> Sequence[Any]:
    """The elements of a container."""
    if value is None or isinstance(value, int | float | str | bytes):
        return ()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, range):
        return [value.start] * len(value)
    if isinstance(value, jinja2.utils.Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return list(value) if isinstance(value, Set | ValuesView) else ()
