#!/usr/bin/env python3
"""Prints the README's table of settings, made from the configuration dataclasses; with --write puts it into README.md.

A test compares the README with it, so the table can be trusted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig, environment_name, flag_name

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: made by scripts/settings_table.py --write -->"
END = "<!-- end of settings -->"


def table() -> str:
    """Markdown: one row per field of every configuration class, in the order of the code."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for config in (EngineConfig, ServerConfig, TelemetryConfig):
        lines += [row(field) for field in dataclasses.fields(config)]
    return "\n".join(lines)


def row(field: dataclasses.Field[Any]) -> str:
    name = field.name.upper() if field.metadata["positional"] else f"`{flag_name(field.name)}`"
    default = "" if field.default in (None, "", ()) else f"`{field.default}`"
    meaning = field.metadata["help"].replace("|", "\\|")
    return f"| {name} | `{environment_name(field.name)}` | {default} | {meaning} |"


def replaced(text: str) -> str:
    """`text` with the table between the two markers made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
