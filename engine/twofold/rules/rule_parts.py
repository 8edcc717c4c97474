"""Values common to all kinds of rules: an object of known keys, a format, layer ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from twofold.api.errors import ConfigError
from twofold.rules.yaml_file import nearest, short
from twofold.weights.weight_format import FORMATS


def mapping(value: Any, where: str, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The value if it is an object with some of these keys and no others. Raises ConfigError."""
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{where}: {what} is {short(value)}, expected {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise ConfigError(f"{where}: {what} has {short(key)}; {nearest(str(key), keys)}")
    return value


def known_format(value: Any, where: str) -> str:
    """The name of a format that weights can be converted to. Raises ConfigError that begins with `where`."""
    known = tuple(name for name, layout in FORMATS.items() if layout.quantised)
    if value not in known:
        problem = f"has no format; it takes {', '.join(known)}"
        if value is not None:
            problem = f"format is {short(value)}; {nearest(str(value), known)}"
        raise ConfigError(f"{where}: {problem}")
    return str(value)


def layer_range(value: Any, where: str) -> tuple[int, int]:
    """(first, last) layer, both included, for 3, "3-7", first or last; negative numbers count from the end.

    Raises ConfigError that begins with `where`.
    """
    named = {"first": 0, "last": -1}
    if value in named:
        return named[value], named[value]
    numbers = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value))
    if numbers is None:
        raise ConfigError(
            f"{where}: layers has {short(value)}, expected a number, a range such as 3-7, first or last"
        )
    return int(numbers[1]), int(numbers[2] or numbers[1])


def is_within(layer: int, ranges: Iterable[tuple[int, int]], num_layers: int) -> bool:
    """Whether a layer of `num_layers` is in one of these ranges, results of `layer_range`."""
    counted = ([at if at >= 0 else num_layers + at for at in ends] for ends in ranges)
    return any(first <= layer <= last for first, last in counted)


def as_list(value: Any) -> list[Any]:
    """The value as a list; a single value becomes a list of one."""
    return value if isinstance(value, list) else [value]
