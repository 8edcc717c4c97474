"""Commands of the README and the guides, and the marks of those that no test can run.

A mark is a comment directly above a code block, such as `<!-- not run: download -->`. It holds for the whole block.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
PAGES = [
    ROOT / "README.md",
    *sorted(GUIDES.rglob("*.md")),
    ROOT / "docs/quick-start.zh.md",
    ROOT / "docs/reference/serve-a-real-model.md",
    ROOT / "docs/adapters/serve-adapters.md",
    ROOT / "docs/explanation/expert-scheduling.md",
    ROOT / "docs/explanation/performance.md",
    ROOT / "docs/explanation/speculation.md",
]
MARKS = {
    "download": "fetches a model or packages from the internet",
    "GPU": "needs a graphics card, or a model that has one in mind",
    "another program": "starts a program that Twofold does not install",
    "administrator": "changes the system",
    "long": "takes minutes",
}
"""Marks, and why such a block is not run."""

_BLOCK = re.compile(r"(?:<!-- not run: ([\w ]+) -->\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Documented:
    """One command of a page."""

    page: Path
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    mark: str = ""

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page.stem}: {' '.join(self.words)[:60]}"


def documented(page: Path) -> list[Documented]:
    """The commands of a page's shell blocks, in order."""
    found = []
    for mark, language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for words in _split(block) if language in ("", "sh") else ():
            variables = [word.partition("=")[::2] for word in words if _VARIABLE.match(word)]
            count = next((i for i, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
            if count < len(words):
                found.append(Documented(page, tuple(words[count:]), tuple(variables[:count]), mark))
    return found


def _split(block: str) -> Iterator[list[str]]:
    """The words of each command; a command may span lines."""
    text = ""
    for line in block.splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text.replace("\\\n", " ").rstrip("&\n "), comments=True)
        except ValueError:  # an open quotation
            continue
        if not line.endswith("\\"):
            yield words
            text = ""
