"""Files are short and their names say something; folders are small."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "stuff"}

MAX_LINES = 450
MAX_ENTRIES = 25
MIRROR = "tests"
"""The folder that mirrors the packages: it has as many entries as there are packages."""


def test_kernels_is_no_python_package() -> None:
    assert list((ROOT / "kernels").rglob("__init__.py")) == []


def code_files() -> list[Path]:
    tops = ("engine", "kernels", "dashboard", "loadtest", "benchmarks", "models", "scripts", "tests")
    found = [p for top in tops for p in (ROOT / top).rglob("*") if "__pycache__" not in p.parts]
    return sorted(p for p in found if p.suffix in {".py", ".sh", ".h", ".cpp", ".inc", ".cu", ".cuh"})


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [p for p in code_files() if {p.stem, p.parent.name} & VAGUE_NAMES]
    assert vague == []


def test_files_stay_short_enough_to_read() -> None:
    lengths = {
        p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in code_files()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_folders_stay_small_enough_to_survey() -> None:
    """At most 25 entries in a folder but the tests' own."""
    tops = [
        ROOT / top for top in ("engine", "kernels", "dashboard", "loadtest", "benchmarks", "scripts", "tests")
    ]
    folders = [folder for top in tops for folder in (top, *top.rglob("*")) if folder.is_dir()]
    sizes = {
        folder.relative_to(ROOT).as_posix(): len([e for e in folder.iterdir() if e.name != "__pycache__"])
        for folder in folders
        if "__pycache__" not in folder.parts
    }
    assert {name: size for name, size in sizes.items() if size > MAX_ENTRIES and name != MIRROR} == {}
