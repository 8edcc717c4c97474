"""Count private idiom in comments, docstrings, documents and names, and long sentences in guides and explanations.

No idiom where users read, no more than LIMITS elsewhere; no sentence above MAX_WORDS words in SHORT. Names of
functions, variables, files and tests follow the same rules (PRIVATE_PARTS). docs/contributing/glossary.md gives each
overloaded word one meaning.
An engineer from the field must understand every sentence at first reading: subject first, things are things, "after"
instead of "behind". `make lint` runs this; a lower count lowers its limit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_BEGIN: Final = r"(?://|(?<!#)#|\"\"\"|/\*)\s*"
IDIOM: Final = re.compile(
    rf"{_BEGIN}(?:(?-i:Of) (?!course\b)\w|Of (?:a|an|the|each|what|all|their|its|this|these|those|which|both|one)\b)"
    rf"|{_BEGIN}(?-i:Those|Who|Whose|Whom|Whoever)\b"
    rf"|{_BEGIN}What (?:becomes|became|ends|makes|distinguishes) "
    r"|\b(?:nobody|somebody|whoever|everybody|anybody|newcomers?|anew|afresh)\b"
    r"|\b(?:is|are|was|were|been|being) told\b(?! apart)"
    r"|'s (?:own )?affair\b|\bis let go\b|\bcomes? to an end\b|\bdown at once, up\b"
    r"|\breads? over\b|\bwhat sees\b|\bbroke off\b"
    r"|\bbehind (?:a|the|its) (?:prompt|context|last|first|step|token|begin)",
    re.IGNORECASE,
)
PRIVATE_PARTS: Final = frozenset(
    (
        *("nobody", "somebody", "whoever", "everybody", "anybody", "everyone", "who", "whom", "oneself"),
        *("told", "said", "newcomer", "newcomers", "anew", "afresh", "behind", "fate", "fates", "felt"),
        *("lend", "lent", "bring", "brings", "doubt", "doubts", "luck", "guilty", "hated"),
    )
)
"""Words that no identifier, file or test is made of."""
PRIVATE_RUNS: Final = re.compile(
    r"(?:^|_)(?:let_go|keep_books|goe?s?_on|gives?_way|say_so|says_so|begins?_alike)(?:_|$)"
)
TEST_PARTS: Final = frozenset(["say", "says", "tell", "tells"])
"""Further words that no test's name is made of: it names what the program does."""
MAX_WORDS: Final = 30
SHORT: Final = (
    "docs/guides/",
    "docs/contributing/",
    "docs/explanation/",
    "docs/design.md",
    "docs/README.md",
    "README.md",
    "CONTRIBUTING.md",
)
"""Pages whose sentences are short; the notebook keeps history as it was written."""
_NO_PROSE: Final = re.compile(r"```.*?```|<!--.*?-->|!\[[^\]]*\]\([^)]*\)|(?m:^#[^\n]*)", re.DOTALL)
_INLINE: Final = re.compile(r"`[^`]*`|\]\([^)]*\)")
_BLOCK_END: Final = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=\|)|\n(?=#)")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[)\"*]?\s+(?=[A-Z`*\[(\d])")
OWN: Final = "scripts/check_words.py"
TALE: Final = "engine/twofold/quantise/tale.txt"
GENERATED: Final = "docs/reference/"
"""Repeats sentences of the code, which are counted there."""
SUFFIXES: Final = {".py", ".pyi", ".md", ".cpp", ".h", ".cu", ".cuh", ".sh", ".txt", ".toml"}
LIMITS: Final[dict[str, int]] = {}
"""Most hits of a top folder (of `engine`, the next two levels); what is not here has none."""


_CPP: Final = frozenset({".cpp", ".h", ".cu", ".cuh"})
_CPP_TEXT: Final = re.compile(
    r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*(?:.|\n)*?\*/|#include[^\n]*'
)
_PYTHON_TEXT: Final = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'|#[^\n]*"
)
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_PART: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def private_names(path: str, text: str) -> set[str]:
    """Identifiers of a Python or C++ file, and its own name, that are private idiom."""
    suffix = Path(path).suffix
    if suffix not in _CPP | {".py", ".pyi"}:
        return set()
    code = (_CPP_TEXT if suffix in _CPP else _PYTHON_TEXT).sub(" ", text)
    return {name for name in {Path(path).stem, *_NAME.findall(code)} if _is_private(name)}


def _is_private(name: str) -> bool:
    parts = {part.lower() for part in _PART.findall(name)}
    forbidden = PRIVATE_PARTS | TEST_PARTS if name.startswith("test_") else PRIVATE_PARTS
    return bool(parts & forbidden) or PRIVATE_RUNS.search(name) is not None


def room_of(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[: 3 if parts[0] == "engine" else 1])


def hits(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that holds idiom."""
    for number, line in enumerate(lines, 1):
        if IDIOM.search(line):
            yield number, line.strip()


def long_sentences(text: str) -> Iterator[str]:
    """Sentences of a Markdown page with more than MAX_WORDS words; code in backquotes counts as one word."""
    for block in _BLOCK_END.split(
        _INLINE.sub(lambda found: "`x`" if found[0][0] == "`" else "]", _NO_PROSE.sub("", text))
    ):
        cells = re.split(r"(?<!\\)\||; ", block) if block.lstrip().startswith("|") else [block]
        for sentence in (each for cell in cells for each in _SENTENCE_END.split(cell)):
            if len(re.findall(r"\w[\w'’./-]*|`x`", sentence)) > MAX_WORDS:
                yield " ".join(sentence.split())


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found: Counter[str] = Counter()
    places: list[tuple[str, str]] = []
    failed = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith((GENERATED, OWN, TALE)):
            text = path.read_text(encoding="utf-8")
            if name.startswith(SHORT):
                for sentence in long_sentences(text):
                    failed = 1
                    print(f"{name}: more than {MAX_WORDS} words: {sentence[:100]}…")
            for private in sorted(private_names(name, text)):
                failed = 1
                print(f"{name}: the name {private} is private idiom; use the field's words")
            for number, line in hits(text.splitlines()):
                found[room_of(name)] += 1
                places.append((room_of(name), f"{name}:{number}: {line[:120]}"))
    for room in sorted(found.keys() | LIMITS.keys()):
        limit = LIMITS.get(room, 0)
        if found[room] > limit:
            failed = 1
            print(f"{room}: {found[room]} sentences in private idiom, at most {limit}; say them plainly:")
            print("\n".join(f"  {place}" for owner, place in places if owner == room))
        elif found[room] < limit:
            failed = 1
            print(f"{room}: {found[room]} sentences in private idiom; lower its limit of {limit}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
