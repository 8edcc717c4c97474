"""The reference pages are what the code says, and the index of the documents lists every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.reference.__main__ import FOLDER, PAGES, page

DOCS = FOLDER.parent


SLOW = ("serve-a-real-model",)
"""Pages that take more than ten seconds to write."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PAGES])
def test_a_reference_page_matches_the_code(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == page(name), (
        "run python -m scripts.reference"
    )


def test_all_reference_pages_are_generated() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PAGES)


def test_the_settings_page_names_every_setting_once() -> None:
    names = re.findall(r"`(TWOFOLD_[A-Z_]+)` \|", (FOLDER / "settings.md").read_text(encoding="utf-8"))
    assert len(names) == len(set(names)) > 15


def test_the_index_lists_every_page() -> None:
    linked = re.findall(r"\]\(([\w/.-]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert pages == set(linked)


def test_every_room_of_the_documents_stays_small() -> None:
    rooms = [DOCS, *(path for path in DOCS.rglob("*") if path.is_dir())]
    assert {room.name: len(list(room.iterdir())) for room in rooms if len(list(room.iterdir())) > 25} == {}


def test_the_tree_is_described_once() -> None:
    """Only the design lists the folders of the repository."""
    listing = re.compile(r"^(?:kernels|dashboard|benchmarks|loadtest)/ {2,}", re.MULTILINE)
    root = Path(DOCS).parent
    pages = [*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    assert [p.name for p in pages if listing.search(p.read_text(encoding="utf-8"))] == ["design.md"]
