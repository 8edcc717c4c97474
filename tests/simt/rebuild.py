"""Compiles sources of the SIMT machine's kernels once more, as the build does: changed, or counting lines."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels/cuda"
BUILD = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "dev"
PROGRAM = "simt_kernels"
EVERY_KERNEL = "every_kernel_of_the_sources_is_executed"
"""The case that runs the others."""
_LIMIT_S = 570


@functools.cache
def _commands() -> list[str]:
    """Shell commands that build the program, the last of which links it."""
    if not (BUILD / "tests/simt" / PROGRAM).exists():
        if os.environ.get("TWOFOLD_TESTS_NEED_ALL") == "1":
            pytest.fail("the SIMT machine's tests are not built beside these sources")
        pytest.skip("the SIMT machine's tests are not built beside these sources")
    listing = ["ninja", "-C", str(BUILD), "-t", "commands", PROGRAM]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True, timeout=60)
    return [line for line in listed.stdout.splitlines() if not line.startswith("ninja:")]


def _run(command: str) -> None:
    done = subprocess.run(
        command, shell=True, cwd=BUILD, check=False, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"


def compile_kernels(source: Path, output: Path, options: str = "") -> None:
    """Compiles `source`, or a copy of it elsewhere, with the options of the source of that name, then `options`."""
    (command,) = [c for c in _commands() if re.search(rf"\S/{re.escape(source.name)}\.o -c ", c)]
    command = re.sub(r" -MD -MT \S+ -MF \S+ -o \S+\.o -c \S+", f" {options} -o {output} -c {source}", command)
    assert str(source) in command, command
    _run(command)


def link(objects: Sequence[Path], program: Path, options: str = "") -> None:
    """The program with `objects` in the place of those of the same sources."""
    own = " ".join(str(each) for each in objects)
    command = _commands()[-1].replace(f"-o tests/simt/{PROGRAM}", f"{options} -o {program} {own}")
    assert str(program) in command, command
    _run(command)


def cases(program: Path, first: Sequence[str] = ()) -> list[str]:
    """All but the one that runs the others, those before the rest whose names begin as `first` says."""
    listing = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    before = [case for name in first for case in listing if case.startswith(name)]
    return before + [case for case in listing if case not in (*before, EVERY_KERNEL)]
