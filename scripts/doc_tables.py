#!/usr/bin/env python3
"""Prints the documents' tables that are generated from code; with --write inserts each between its marks.

Tests compare the documents with the generated tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.settings import environment_name, fields_by_class, flag_name

ROOT = Path(__file__).resolve().parent.parent


class MarkedTable(NamedTuple):
    name: str
    document: Path
    table: Callable[[], str]
    """Markdown."""

    def replaced(self, text: str) -> str:
        """`text` with the table between the two marks regenerated."""
        begin = f"<!-- {self.name}: made by scripts/doc_tables.py --write -->"
        end = f"<!-- end of {self.name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        return f"{before}{begin}\n{self.table()}\n{end}{after}"


def settings() -> str:
    """One row per field of every configuration class, in the order of the code."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for config in (EngineConfig, ServerConfig, TelemetryConfig):
        lines += [_setting(field) for _, fields in fields_by_class(config) for field in fields]
    return "\n".join(lines)


def _setting(field: dataclasses.Field[Any]) -> str:
    name = field.name.upper() if field.metadata["positional"] else f"`{flag_name(field.name)}`"
    if isinstance(field.default, bool):
        name += f", `{flag_name('no_' + field.name)}`"
    default = "" if field.default in (None, "", ()) else f"`{field.default}`"
    meaning = field.metadata["help"].replace("|", "\\|")
    return f"| {name} | `{environment_name(field.name)}` | {default} | {meaning} |"


def request_fields() -> str:
    """Support of each field of a request."""
    from twofold.server.http.fields import markdown  # needs the server's packages

    return markdown()


def aliases() -> str:
    """Support of other engines' flags."""
    from twofold.tools.cli.flag_aliases import markdown

    return markdown()


TABLES = (
    MarkedTable("settings", ROOT / "README.md", settings),
    MarkedTable("aliases", ROOT / "docs" / "guides" / "migrate.md", aliases),
    MarkedTable("fields", ROOT / "docs" / "guides" / "serving.md", request_fields),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into their documents")
    write = parser.parse_args().write
    for marked in TABLES:
        if write:
            text = marked.document.read_text(encoding="utf-8")
            marked.document.write_text(marked.replaced(text), encoding="utf-8")
        else:
            print(marked.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
