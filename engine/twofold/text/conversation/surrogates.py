"""Half a character in JSON text: programs that cut UTF-16 text leave one half of an escaped surrogate pair."""

from __future__ import annotations

import re
from typing import AnyStr, Final

_ESCAPES: Final = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""A pair, a half in group 1, or any other escape."""
_IN_TEXT: Final = re.compile(_ESCAPES, re.DOTALL)
_IN_BYTES: Final = re.compile(_ESCAPES.encode(), re.DOTALL)


def whole_characters(json_text: AnyStr) -> AnyStr:
    """JSON text in which U+FFFD replaces each half of a character."""
    if isinstance(json_text, bytes):
        return _IN_BYTES.sub(lambda match: rb"\ufffd" if match[1] else match[0], json_text)
    return _IN_TEXT.sub(lambda match: r"\ufffd" if match[1] else match[0], json_text)
