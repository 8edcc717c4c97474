#!/usr/bin/env python3
"""Prints the table of request fields of docs/serving.md; with --write puts it there. A test compares the two."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twofold.server.fields import markdown

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "serving.md"
BEGIN = "<!-- fields: made by scripts/fields_table.py --write -->"
END = "<!-- end of fields -->"


def replaced(text: str) -> str:
    """`text` with the table between the two markers made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/serving.md")
    if parser.parse_args().write:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
