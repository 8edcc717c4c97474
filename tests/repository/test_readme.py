"""The README and the other documents tell the truth: make targets, commands, scripts and programs exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.__main__ import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_targets_that_documents_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        (path.name, target)
        for path in DOCUMENTS
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named
    assert sorted((name, target) for name, target in named if target not in targets) == []


def test_commands_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"(?:`|^)twofold ([a-z]+)", README, re.MULTILINE))
    assert {"serve", "generate", "chat", "bench", "doctor", "version", "telemetry", "lab"} <= named


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "models/twofold-tales/README.md")),
    *(ROOT / "docs").rglob("*.md"),
]


def test_packages_of_the_python_examples_are_installed_in_the_readme() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    imported = {
        name for text in examples for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    }
    assert "openai" in imported
    for name in imported - {"twofold"} - sys.stdlib_module_names:
        assert f"`pip install {name}`" in README


def test_the_quick_start_begins_with_a_clone() -> None:
    commands = README.split("## Install and run", 1)[1].split("```")[1].split("\n")
    assert commands.index("git clone <repository URL> twofold && cd twofold") < commands.index("make run")


def test_scripts_that_documents_name_exist() -> None:
    named = {
        match
        for path in DOCUMENTS
        for match in re.findall(
            r"\b(?:scripts|models/training)/[a-z_]+\.(?:sh|py)\b", path.read_text(encoding="utf-8")
        )
    }
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_programs_that_documents_name_exist() -> None:
    program = re.compile(r"python3? -m ((?:benchmarks|scripts|tests)[a-z_.]*)(?: ([a-z-]+))?")
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    found = {match for text in texts for match in program.findall(text)}
    scenarios = {name for module, name in found if module == "benchmarks" and name}
    assert {"peers", "targets", "serving"} <= scenarios <= {*SCENARIOS}
    named = {module for module, _ in found}
    places = {name: ROOT / name.replace(".", "/") for name in named}
    missing = [
        name
        for name, place in places.items()
        if not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file()
    ]
    assert missing == []


def test_files_that_documents_name_exist() -> None:
    """Paths in README, CONTRIBUTING and guides; NAME and FAMILY stand for what a reader chooses."""
    path = re.compile(r"`((?:engine|kernels|tests|dashboard|docs|scripts|benchmarks|loadtest)/[\w./-]+)`")
    pages = [page for page in DOCUMENTS if GUIDES in page.parents or page.parent == ROOT]
    named = {(page.name, name) for page in pages for name in path.findall(page.read_text(encoding="utf-8"))}
    chosen = re.compile("NAME|FAMILY")
    missing = [each for each in named if not chosen.search(each[1]) and not (ROOT / each[1]).exists()]
    assert sorted(missing) == []


def test_files_on_the_paths_through_the_code_exist() -> None:
    page = (ROOT / "docs/explanation/structures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:twofold|core|runtime|bindings|\.\.)/[\w./]+)`", page))
    assert len(named) > 60
    assert sorted(name for name in named if not (ROOT / "engine" / name).exists()) == []
