"""The recipes of CONTRIBUTING.md: each has a commit of this repository, and a diff that applies to the tree and works.

`tests/recipes/NAME.diff` is an example that is not part of the product. A change that moves the lines around it also
mends the diff.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
DIFFS: Final = ROOT / "tests" / "recipes"
CONTRIBUTING: Final = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_COMPILE: Final = ("c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
_CORE: Final = ("-Iengine/core/include", "-Ikernels/include")
_FORMATS: Final = (
    "#include <twofold/formats/registry.h>\nstatic_assert(twofold::kernels::formats::NF4::kBlockBytes == 18);"
)

CHECKS: Final[dict[str, tuple[str, ...]]] = {
    "policy": (*_COMPILE, *_CORE, "engine/core/cache_policy.cpp", "engine/core/policies_classic.cpp"),
    "counter": (*_COMPILE, *_CORE, "engine/core/prefetcher.cpp"),
    "scheduler-option": (*_COMPILE, *_CORE, "engine/core/layer_scheduler.cpp", "engine/core/cache_config.cpp"),
    "format": ("sh", "-c", f"echo '{_FORMATS}' | {' '.join(_COMPILE)} -Ikernels/include -x c++ -"),
    "family": ("pytest", "tests/models/test_families.py", "-k", "ministral"),
    "dialect": ("pytest", "tests/text/test_parsers.py", "-k", "jamba"),
    "page": ("pytest", "tests/dashboard/test_changes.py"),
    "setting": ("pytest", "tests/telemetry/test_writer.py", "-k", "setting_limits"),
    "telemetry-column": ("pytest", "tests/engine/test_step_parts.py", "tests/telemetry/test_upgrade.py"),
}  # fmt: skip
"""The smallest command that shows a recipe's change at work. C++ is compiled, not linked: a build takes minutes."""

# An editable installation's finder is an instance among classes, and would find the installed tree.
_PYTEST: Final = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path[:0] = ["engine", "."]
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def git(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def sections() -> dict[str, str]:
    """Text of each section "Add a …"."""
    parts = re.split(r"^##+ ", CONTRIBUTING, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts if part.startswith("Add a")}


def test_every_recipe_has_a_commit_and_a_diff() -> None:
    named = re.findall(r"`tests/recipes/([a-z-]+)\.diff`", CONTRIBUTING)
    assert sorted(named) == sorted(CHECKS) == sorted(path.stem for path in DIFFS.glob("*.diff"))
    for title, text in sections().items():
        assert re.search(r"`git show [0-9a-f]{8}`", text), f"{title}: which commit did it?"
        assert "tests/recipes/" in text, f"{title}: no diff that a test applies"


def test_the_commits_are_there() -> None:
    commits = re.findall(r"`git show ([0-9a-f]{8})`", CONTRIBUTING)
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a checkout without its history")
    assert [each for each in commits if git("cat-file", "-e", f"{each}^{{commit}}").returncode] == []


@pytest.mark.parametrize("name", CHECKS)
def test_the_diff_applies(name: str) -> None:
    done = git("apply", "--check", str(DIFFS / f"{name}.diff"))
    assert done.returncode == 0, f"tests/recipes/{name}.diff does not apply any more:\n{done.stderr}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree."""
    folder = tmp_path_factory.mktemp("tree")
    listed = git("ls-files", "-co", "--exclude-standard").stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_change_works(name: str, scratch: Path) -> None:
    program, *arguments = CHECKS[name]
    command = [sys.executable, "-c", _PYTEST, *arguments] if program == "pytest" else [program, *arguments]
    modules = os.environ.get("TWOFOLD_BUILD_DIR") or str(ROOT / "build")
    environment = {**os.environ, "TWOFOLD_BUILD_DIR": modules, "PYTHONPATH": f"{scratch}/engine"}
    assert git("apply", str(DIFFS / f"{name}.diff"), folder=scratch).returncode == 0
    try:
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    finally:
        git("apply", "-R", str(DIFFS / f"{name}.diff"), folder=scratch)
