"""Writes engine/twofold/weights/format_table.py from what the headers of the formats say: run it after a new header.

python tests/kernels/format_table.py
"""

from __future__ import annotations

from pathlib import Path

from twofold._testing import kernels

TABLE = Path(__file__).resolve().parents[2] / "engine/twofold/weights/format_table.py"
HEAD = """\
\"\"\"Made by tests/kernels/format_table.py from the headers of the formats; fields as in FormatLayout.\"\"\"

from typing import Final

TABLE: Final[tuple[tuple[str, int, int, int, int, int, int, str, bool], ...]] = (
"""


def text() -> str:
    """The module's source."""
    fields = [(name, *layout) for name, layout in kernels.formats().items()]
    rows = "".join(f"    {row},\n".replace("'", '"') for row in fields)
    return f"{HEAD}{rows})\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
