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


@pytest.fixture
def fake_layer_python(tmp_path: Path) -> FakePython:
    """Makes an executable that plays a layer's worker: one token takes `one_s`, more take `one_s` * tokens / `gain`."""

    def make(name: str, one_s: float = 0.001, gain: float = 2.0, fails_at: int = 0, chat: str = "") -> str:
        path = tmp_path / name
        source = (
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"open({str(path) + '.pids'!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
            f"sys.stderr.write({chat!r})\nprint('chatter')\n"
            "print(json.dumps({'ready': 'x', 'bytes': 1000000}), flush=True)\n"
            "for line in sys.stdin:\n"
            "    order = json.loads(line)\n"
            "    tokens = order['tokens']\n"
            f"    if tokens == {fails_at}: sys.exit('out of luck')\n"
            f"    took = {one_s} if tokens == 1 else {one_s} * tokens / {gain}\n"
            "    answer = {'tokens': tokens, 'seconds': [took] * order['repeats'], 'touched': [8] * order['repeats']}\n"
            "    print(json.dumps(answer), flush=True)\n"
        )
        path.write_text(source, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make
