"""What is published: one version in every place that names it, and wheels with what pyproject.toml promises."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.release_version import disagreements, newest_release, tagged_elsewhere

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

- later

## [0.3.0] - 2026-12-24

- new

## [0.2.0] - 2026-11-27

- old
"""


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))


def test_every_place_names_the_version_of_the_newest_dated_section() -> None:
    """Run as the workflow runs it, before anything is built."""
    (command,) = [
        step["run"] for step in workflow("release.yml")["jobs"]["version"]["steps"] if "run" in step
    ]
    python, script, *_ = command.split()
    assert (python, (ROOT / script).is_file()) == ("python3", True)
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    release = newest_release((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert release is not None, done.stderr
    assert disagreements(ROOT, release[0], f"v{release[0]}", []) == []
    # After the release its tag names another commit than the one checked out here.
    assert done.stdout == f"tag=v{release[0]}\n" or "names another commit already" in done.stderr


def test_the_newest_dated_section_gives_version_and_notes() -> None:
    assert newest_release(CHANGELOG) == ("0.3.0", "- new\n")
    assert newest_release("## [Unreleased]\n\n- later\n") is None


@pytest.mark.parametrize(
    ("tag", "built", "says"),
    [
        ("v0.2.0", (), "the tag is v0.2.0; expected v9.9.9"),
        ("v9.9.9", ("twofold-9.9.9.dev3-cp311-cp311-manylinux_2_28_x86_64.whl",), "has version 9.9.9.dev3"),
        ("v9.9.9", ("twofold-9.9.9-cp311-cp311-linux_x86_64.whl",), "is no manylinux wheel"),
        ("v9.9.9", ("twofold-9.9.8.tar.gz",), "has version 9.9.8; build it at the tag v9.9.9"),
    ],
)
def test_a_wrong_tag_or_built_file_is_refused(
    tag: str, built: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    for name, text in {
        "pyproject.toml": 'fallback_version = "9.9.9"',
        "CITATION.cff": "version: 9.9.9",
        "deploy/helm/twofold/Chart.yaml": 'appVersion: "9.9.9"',
        "deploy/kserve/inference-service.yaml": "  image: REGISTRY/twofold:9.9.9",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    fine = (
        "twofold-9.9.9-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "twofold-9.9.9.tar.gz",
    )
    assert disagreements(tmp_path, "9.9.9", "v9.9.9", fine) == []
    (found,) = disagreements(tmp_path, "9.9.9", tag, built)
    assert says in found


def test_a_tag_of_another_commit_stops_the_release(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert not tagged_elsewhere(tmp_path, "v1.0.0")
    git("tag", "v1.0.0")
    assert not tagged_elsewhere(tmp_path, "v1.0.0")  # a release that is run again
    git("commit", "--allow-empty", "-m", "two")
    assert tagged_elsewhere(tmp_path, "v1.0.0")


def test_files_are_published_only_after_the_check_and_the_tag() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["version", "build"]
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    steps = [step.get("run") or step["uses"] for step in jobs["publish"]["steps"]]
    check, tag, upload, notes = (
        next(index for index, step in enumerate(steps) if text in step)
        for text in (
            "release_version.py --tag",
            "git push origin",
            "gh-action-pypi-publish",
            "gh release create",
        )
    )
    assert check < tag < upload < notes


def test_published_wheels_have_cuda_from_a_compiler_of_the_python_index() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    environment = settings["environment"]
    assert environment["TWOFOLD_CUDA"] == "ON"
    python, script, action, folder, *_ = settings["before-all"].split()
    assert (python.startswith("/opt/python/"), action) == (True, "fetch")
    assert (ROOT / script.replace("{project}", str(ROOT))).is_file()
    assert environment["CUDA_HOME"].startswith(f"{folder}/")
    assert any("from twofold import _cuda" in command for command in settings["test-command"])
