"""What no file of this repository may hold, beside what `make lint` checks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


# Spelt in pieces, so that this file does not hold them.
UNFINISHED = re.compile(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'XX' + 'X'}|{'NotImpl' + 'ementedError'})\b")


def test_nothing_unfinished() -> None:
    found = {}
    for name in tracked("*.py", "*.cpp", "*.h", "*.sh", "*.toml", "Makefile", "*.txt", "*.cu"):
        hits = UNFINISHED.findall((ROOT / name).read_text(encoding="utf-8"))
        if hits:
            found[name] = hits
    assert found == {}


def test_links_between_documents_lead_somewhere() -> None:
    links = [
        (name, target)
        for name in tracked("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("mailto:")
    ]
    assert [link for link in links if not ((ROOT / link[0]).parent / link[1]).exists()] == []
