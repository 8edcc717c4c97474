"""Interpreters that play other engines."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FakePython = Callable[..., str]


@pytest.fixture
def fake_python(tmp_path: Path) -> FakePython:
    """Makes an executable that prints the given JSON lines, notes its arguments beside it and ends with `code`."""

    def make(name: str, lines: list[Any], code: int = 0, stderr: str = "") -> str:
        path = tmp_path / name
        printed = "\n".join(json.dumps(line) for line in lines)
        source = (
            f"#!{sys.executable}\nimport json, sys\n"
            f"open({str(path) + '.calls'!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
            f"print({printed!r})\nsys.stderr.write({stderr!r})\nsys.exit({code})\n"
        )
        path.write_text(source, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def calls_of() -> Callable[[str], list[list[str]]]:
    """The argument lists that a fake interpreter was called with."""

    def read(path: str) -> list[list[str]]:
        notes = Path(path + ".calls")
        return (
            [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
            if notes.exists()
            else []
        )

    return read
