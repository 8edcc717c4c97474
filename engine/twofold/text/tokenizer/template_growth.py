"""Characters that a filter, method or operator of a chat template would make, estimated before it runs.

Everything that makes more text than it reads is listed here. Estimates are upper bounds for text without HTML marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from twofold.text.tokenizer.template_budget import TemplateLimitError, ValueSize

_MAX_INT_BITS: Final = 1 << 14
"""Bits of a whole number that arithmetic may read or make: division takes the square of them."""
_MAX_DIGITS: Final = 100
_ESCAPED: Final = 6
"""Characters that JSON or HTML may write for one."""
_CONVERSION: Final = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*)?)?")
_NESTED_KEY: Final = re.compile(r"%\([^)]*\(")
_DIGITS: Final = re.compile(r"\d+")
_HUGE: Final = 1 << 40

Estimate = Callable[..., int]
"""(size of the value, the value, further arguments as in the call) → characters or elements."""


def percent_format(size: ValueSize, text: str, given: Any) -> int:
    """Size of `text % given`; `size` is that of `given`."""
    if _NESTED_KEY.search(text):
        widths = [*_DIGITS.findall(text)]
    else:
        widths = [width for pair in _CONVERSION.findall(text) for width in pair if width]
    values = given if isinstance(given, tuple) else (given,)
    star: int = max((abs(each) for each in values if isinstance(each, int)), default=0)
    written: int = sum(star if width == "*" else number(width) for width in widths)
    return len(text) + written + text.count("%") * (_ESCAPED * size.chars + 2 * size.elements)


def number(digits: str) -> int:
    """A width in a format; a large number for one of many digits."""
    return int(digits) if len(digits) < 12 else _HUGE


def _replaced(size: ValueSize, text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    num_chars, num_found = len(str(text)), str(text).count(str(old))
    return num_chars + num_found * len(str(new))


def _joined(size: ValueSize, items: Any, separator: Any = "", attribute: Any = None) -> int:
    return size.chars + size.elements * (len(str(separator)) + 4)


def _indented(size: ValueSize, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    return size.chars + (len(str(text).splitlines()) + 1) * _length(width)


def _json(
    size: ValueSize,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> int:
    between = 4 + sum(_length(each) for each in separators or ()) + size.levels * _length(indent or 0)
    return _ESCAPED * size.chars + size.elements * between


def _percent_filter(size: ValueSize, text: Any, *args: Any, **kwargs: Any) -> int:
    given = (*args, *kwargs.values())
    return percent_format(ValueSize(len(given), sum(len(str(each)) for each in given), 1), str(text), given)


def _padded(size: ValueSize, text: Any, width: Any = 80, *fill: Any) -> int:
    return size.chars + _length(width)


def _cut(size: ValueSize, items: Any, count: Any, fill_with: Any = None) -> int:
    return size.elements + _length(count)


def _rounded(size: ValueSize, value: Any, precision: Any = 0, method: str = "common") -> int:
    return size.chars if abs(precision) <= _MAX_DIGITS else _HUGE


def _escaped(size: ValueSize, *args: Any, **kwargs: Any) -> int:
    return _ESCAPED * size.chars


def _expanded(size: ValueSize, text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * _length(tabsize)


def _joined_by(size: ValueSize, separator: str, items: Any = ()) -> int:
    return size.chars + len(items) * len(separator) if isinstance(items, Sequence) else _HUGE


def _length(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(str(value))


FILTERS: Final[Mapping[str, Estimate]] = MappingProxyType(
    {
        "replace": _replaced, "join": _joined, "indent": _indented, "tojson": _json, "format": _percent_filter,
        "center": _padded, "batch": _cut, "slice": _cut, "round": _rounded, "e": _escaped, "escape": _escaped,
        "forceescape": _escaped, "urlencode": _escaped,
    }
)  # fmt: skip
METHODS: Final[Mapping[str, Estimate]] = MappingProxyType(
    {
        "replace": _replaced, "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded,
        "expandtabs": _expanded, "join": _joined_by,
    }
)  # fmt: skip
"""Methods of text."""
REFUSED_FILTERS: Final = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))
"""Filters for HTML pages, whose time is the square of their text's length or worse. No chat template needs them."""
REFUSED_METHODS: Final = frozenset(("encode", "maketrans", "striptags", "to_bytes", "translate"))
PRODUCTS: Final = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"))
"""Methods and filters whose time is the product of two texts' lengths."""


def num_split_steps(name: str, text: str, *args: Any) -> int:
    """Steps for the parts that a method or filter splits `text` into; 0 if it does not split."""
    if name in ("split", "rsplit") and args and isinstance(args[0], str):
        return 4 * text.count(args[0]) if args[0] else 0
    return 2 * len(text) if name in ("split", "rsplit", "splitlines", "title", "wordcount") else 0


def multiplied(left: Any, right: Any) -> int:
    """Of `left * right`, where one may be text or a list."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            return len(value) * max(times, 0)
    return 0


def check_numbers(operator: str, left: Any, right: Any) -> None:
    """TemplateLimitError if an operation on whole numbers would read or make too large ones."""
    bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
    if operator == "**" and len(bits) == 2:
        bits.append(bits[0] * abs(right))
    if max(bits, default=0) > _MAX_INT_BITS:
        raise TemplateLimitError(f"it computes with a number of more than {_MAX_INT_BITS} bits")
