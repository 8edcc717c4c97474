"""What no file of this repository may hold, beside what `make lint` checks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.check_words import hits, long_sentences, private_names

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


def prose(path: Path) -> str:
    """A page without its fenced blocks: a diff's links and headings are another file's."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for name in tracked("*.md"):
        page = ROOT / name
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
            if "://" in target or target.startswith("mailto:"):
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in headings(file)):
                broken.append((name, target, anchor))
    assert broken == []


def test_documents_that_sources_name_exist() -> None:
    named = re.compile(r"(?<![\w./])docs/[\w/-]+\.md")
    missing = {
        (name, page)
        for name in tracked("*.py", "*.h", "*.cpp", "*.cu", "*.cuh", "*.yaml", "*.toml", "*.sh", "Makefile")
        for page in named.findall((ROOT / name).read_text(encoding="utf-8"))
        if not (ROOT / page).is_file()
    }
    assert missing == set()


def test_long_sentences_and_private_idiom_are_found() -> None:
    words = "word " * 30
    page = f"# {words * 2}\n- {words}\n- {words}\n\n```\n{words * 2}\n```\n| {words} | {words}; {words} |\n"
    assert list(long_sentences(page)) == []
    assert list(long_sentences(f"{page}\nSo {words}end. Next one.")) == [f"So {words}end."]
    assert [number for number, _ in hits(["a step", "before " + "who" + "ever asks"])] == [2]
    assert [number for number, _ in hits(["# O" + "f two, one", "# Of course", "x  # of tokens"])] == [1]


def test_private_names_are_found_in_code_alone() -> None:
    private = "to" + "ld"
    assert private_names("a.py", f'x = "{private}"  # {private}\ndef _{private}(): ...\n') == {f"_{private}"}
    assert private_names("a.cpp", f"int k{private.title()} = 1;  // {private}\n") == {f"k{private.title()}"}
    test = "test_what_it_" + "says"
    assert private_names(f"test_{private}.py", f"def {test}(): ...") == {f"test_{private}", test}
    assert private_names("a.md", private) == set()
