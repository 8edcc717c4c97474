"""Names of files and arguments of commands as text that can be encoded: they may hold any bytes."""

from __future__ import annotations

import re
from typing import Final

_UNENCODABLE: Final = re.compile("[\ud800-\udfff]")


def valid_text(text: str) -> str:
    """`text` with U+FFFD for every byte or half character that no encoding can write, so that an answer in JSON, a log
    and a database can hold it."""
    return _UNENCODABLE.sub("\ufffd", text)
