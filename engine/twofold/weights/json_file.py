"""Bounded reader for a model directory's JSON files; every wrong value is a ModelLoadError that names file and key.

This is not a schema language; it has only the few typed accessors that configs need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import read_regular

MAX_JSON_BYTES: Final = 256 * 1024 * 1024
"""Size limit, bytes: far above any config, index or tokenizer of a real model."""
_MOST_ITEMS: Final = 8
_MOST_CHARACTERS: Final = 160
"""Limits of a wrong value in a message."""

Key = str | tuple[str, ...]
T = TypeVar("T")


def read_json_object(path: Path, purpose: str) -> dict[str, Any]:
    """The JSON object in `path`. `purpose` names the file's use in errors.

    Raises ModelLoadError if the file is missing, unreadable, too large, not JSON or not an object.
    """
    value = _read_json(path, purpose)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, expected an object ({purpose})")
    return value


def read_json_list(path: Path, purpose: str) -> list[Any]:
    """The JSON list in `path`, otherwise as `read_json_object`."""
    value = _read_json(path, purpose)
    if not isinstance(value, list):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, expected a list ({purpose})")
    return value


def _read_json(path: Path, purpose: str) -> Any:
    try:
        raw, size = read_regular(path, MAX_JSON_BYTES)
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(
                f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES} of JSON ({purpose}); download it again"
            )
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ModelLoadError(
            f"{path}: missing ({purpose}); expected a Hugging Face model directory, check the path or download "
            "the model again"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"{path}: not UTF-8 text at byte {error.start} ({purpose}); download it again"
        ) from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror} ({purpose})") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError itself: a number of over 4300 digits
        where = "a number is too long" if isinstance(error, ValueError) else "nested too deep"
        if isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}: {error.msg}"
        raise ModelLoadError(f"{path}: not valid JSON, {where} ({purpose}); download it again") from None


def _cut(found: object) -> str:
    """A value for a message; of a long list, object or text its beginning."""
    if isinstance(found, list | tuple) and len(found) > _MOST_ITEMS:
        first = ", ".join(map(_cut, found[:_MOST_ITEMS]))
        return f"[{first}, … {len(found) - _MOST_ITEMS} more]"
    text = repr(found)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


class Fields:
    """Typed access to one JSON object. A key may be a tuple: the first name present (and not null) counts; `also` has
    further names of keys.

    `where` begins every error message. An absent key has its value in `defaults`, else the reader's default; without
    either it is an error. null is what transformers makes of it: false of a boolean, None of what is optional, and
    where it would fail with None, the same as an absent key.
    """

    def __init__(
        self,
        where: str,
        data: dict[str, Any],
        defaults: Mapping[str, Any] | None = None,
        also: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.where = where
        self.data = data
        self.defaults = defaults or {}
        self.also = also or {}

    def defaulting(self, defaults: Mapping[str, Any]) -> Fields:
        """The same object with further defaults; those it has already take precedence."""
        return Fields(self.where, self.data, {**defaults, **self.defaults}, self.also)

    def with_data(self, data: dict[str, Any], where: str = "") -> Fields:
        """Another object, read with the same defaults and names. where: its place; "": the same."""
        return Fields(where or self.where, data, self.defaults, self.also)

    def is_null(self, key: Key) -> bool:
        """Whether a key is there with null, and none of its names with a value."""
        names = self._names(key)
        return any(name in self.data for name in names) and all(self.data.get(name) is None for name in names)

    def _names(self, key: Key) -> tuple[str, ...]:
        return key if isinstance(key, tuple) else (key, *self.also.get(key, ()))

    def error(self, key: str, found: object, expected: str) -> ModelLoadError:
        """The error for a key with an invalid value."""
        return ModelLoadError(
            f"{self.where}: {key} is {_cut(found)}, expected {expected}; fix or replace this file"
        )

    def get(self, key: Key) -> tuple[str, Any]:
        """(name, value) of the first alternative that is present; value None if none is."""
        names = self._names(key)
        for values in (self.data, self.defaults):
            for name in names:
                if values.get(name) is not None:
                    return name, values[name]
        return names[0], None

    def _default(self, name: str, default: T | None, expected: str) -> T:
        if default is None:
            raise ModelLoadError(
                f"{self.where}: {name} is missing, expected {expected}; fix or replace this file"
            )
        return default

    def integer(
        self, key: Key, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        name, value = self.get(key)
        expected = f"an integer from {minimum} to {maximum}"
        if value is None:
            return self._default(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, value, expected)
        return value

    def optional_integer(self, key: Key, *, minimum: int = 0) -> int | None:
        """An integer; None if it is null, or absent without a default."""
        if self.is_null(key) or self.get(key)[1] is None:
            return None
        return self.integer(key, minimum=minimum)

    def number(
        self,
        key: Key,
        default: float | None = None,
        *,
        minimum: float = 0.0,
        maximum: float = math.inf,
        above: bool = False,
    ) -> float:
        """A finite float in [minimum, maximum]; `above` excludes the minimum itself."""
        name, value = self.get(key)
        expected = f"a number {'above' if above else 'of at least'} {minimum:g}"
        if maximum != math.inf:
            expected += f" and at most {maximum:g}"
        if value is None:
            return self._default(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, expected)
        number = float(value) if abs(value) < 1e300 else math.inf
        if not math.isfinite(number) or number < minimum or number > maximum or (above and number == minimum):
            raise self.error(name, value, expected)
        return number

    def optional_number(
        self, key: Key, *, minimum: float = 0.0, maximum: float = math.inf, above: bool = False
    ) -> float | None:
        """A number; None if it is null, or absent without a default."""
        if self.is_null(key) or self.get(key)[1] is None:
            return None
        return self.number(key, minimum=minimum, maximum=maximum, above=above)

    def boolean(self, key: Key, default: bool | None = None) -> bool:
        name, value = self.get(key)
        if self.is_null(key):
            return False
        if value is None:
            return self._default(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, key: Key, default: str | None = None) -> str:
        name, value = self.get(key)
        if value is None:
            return self._default(name, default, "a string")
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def only(self, key: str, *known: object) -> None:
        """Raises ModelLoadError for any value but `known`; a key without value and default means the first of them."""
        value = self.data.get(key, self.defaults.get(key, known[0]))
        if value not in known and value is not None:
            raise self.error(key, value, f"{' or '.join(map(repr, known))}, which is what is supported")

    def integers(self, key: Key, *, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers, or a single one, or nothing (empty)."""
        name, value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or item < minimum:
                raise self.error(name, value, f"an integer or a list of integers of at least {minimum}")
        return tuple(values)

    def section(self, key: Key) -> Fields | None:
        """A nested object, or None if absent."""
        name, value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(f"{self.where}: {name}", value)
