"""The quick linters of `make lint` (mypy runs there only) and what no file of this repository may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> str:
    """The linter that was installed with the tests' interpreter, else the one on PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not there")
    return path


def tracked(*patterns: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def passes(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    passes(tool("ruff"), "check", "--no-cache", ".")


def test_ruff_format() -> None:
    passes(tool("ruff"), "format", "--no-cache", "--check", ".")


def test_clang_format() -> None:
    passes(tool("clang-format"), "--dry-run", "-Werror", *tracked("*.cpp", "*.h", "*.cu", "*.cuh"))


def test_shellcheck() -> None:
    passes(tool("shellcheck"), "-x", *tracked("*.sh"), ".ci/run")


def test_hadolint() -> None:
    passes(tool("hadolint"), ".devcontainer/Dockerfile")


# Spelt in pieces, so that this file does not hold them.
UNFINISHED = re.compile(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'XX' + 'X'}|{'NotImpl' + 'ementedError'})\b")
DANGEROUS = re.compile(
    r"^\s*(?:import|from) (?:pickle|marshal|shelve)\b|(?<![\w.])(?:eval|exec)\(", re.MULTILINE
)


PRODUCT = [f"{top}/*.py" for top in ("engine", "dashboard", "loadtest", "benchmarks", "models", "scripts")]


def test_nothing_unfinished() -> None:
    found = {}
    for name in tracked("*.py", "*.cpp", "*.h", "*.sh", "*.toml", "Makefile", "*.txt", "*.cu"):
        hits = UNFINISHED.findall((ROOT / name).read_text(encoding="utf-8"))
        if hits:
            found[name] = hits
    assert found == {}


def test_no_pickle_and_no_eval() -> None:
    found = {}
    for name in tracked(*PRODUCT):
        hits = DANGEROUS.findall((ROOT / name).read_text(encoding="utf-8"))
        if hits:
            found[name] = hits
    assert found == {}


def test_python_modules_have_a_docstring() -> None:
    import ast

    bare = []
    for name in tracked(*PRODUCT, "tests/*.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            bare.append(name)
    assert bare == []


def test_links_between_documents_lead_somewhere() -> None:
    links = [
        (name, target)
        for name in tracked("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("mailto:")
    ]
    assert [link for link in links if not ((ROOT / link[0]).parent / link[1]).exists()] == []
