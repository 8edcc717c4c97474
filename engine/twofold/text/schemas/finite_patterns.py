"""Lists the texts that a regular expression matches, if they are few."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

_MAX_TEXTS: Final = 128
_MAX_CHARS: Final = 1024
_BEGIN, _END = "\ue000", "\ue001"
"""Stand for ^ and $ in a text, as private-use characters that no pattern contains."""


def texts_of(pattern: str) -> list[str] | None:
    """The texts that a pattern matches, in order. None: more than 128, texts that only contain a match, or a pattern
    that this module does not understand."""
    try:
        texts = list(dict.fromkeys(_sequence(parser.parse(pattern))))
    except (_NotFiniteError, re.error, RecursionError, OverflowError):
        return None
    whole = [text[1:-1] for text in texts if len(text) > 1 and text[0] == _BEGIN and text[-1] == _END]
    is_anchored = len(whole) == len(texts) and not any(
        mark in text for text in whole for mark in (_BEGIN, _END)
    )
    return whole if is_anchored else None


class _NotFiniteError(Exception):
    """The pattern matches too many texts, or holds a part that is not understood."""


def _sequence(items: Iterable[Any]) -> list[str]:
    texts = [""]
    for item in items:
        texts = _few(one + two for one, two in itertools.product(texts, _item(*item)))
    return texts


def _item(kind: Any, value: Any) -> list[str]:
    if kind is codes.LITERAL:
        return [chr(value)]
    if kind is codes.AT and value in (codes.AT_BEGINNING, codes.AT_END):
        return [_BEGIN if value is codes.AT_BEGINNING else _END]
    if kind is codes.IN:
        return _few(each for part in value for each in _in_class(*part))
    if kind is codes.BRANCH:
        return _few(text for branch in value[1] for text in _sequence(branch))
    if kind is codes.SUBPATTERN and not value[1] and not value[2]:
        return _sequence(value[3])
    if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[1] <= _MAX_TEXTS:
        return _repeated(_sequence(value[2]), *value[:2])
    raise _NotFiniteError


def _repeated(texts: list[str], least: int, most: int) -> list[str]:
    return _few(
        "".join(each) for count in range(least, most + 1) for each in itertools.product(texts, repeat=count)
    )


def _in_class(kind: Any, value: Any) -> Iterable[str]:
    if kind is codes.LITERAL:
        return [chr(value)]
    if kind is codes.RANGE:
        return map(chr, range(value[0], value[1] + 1))
    raise _NotFiniteError


def _few(texts: Iterable[str]) -> list[str]:
    found = list(itertools.islice(texts, _MAX_TEXTS + 1))
    if len(found) > _MAX_TEXTS or any(len(text) > _MAX_CHARS for text in found):
        raise _NotFiniteError
    return found
