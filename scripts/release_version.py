"""Checks that every place that names the version names that of CHANGELOG.md's newest dated section.

    python scripts/release_version.py [--tag vX.Y.Z] [--notes FILE] [BUILT_FILE ...]

Prints `tag=vX.Y.Z`, as a workflow's output. Exit code 1: the places differ, or the tag names another commit.
Needs no package. .github/workflows/release.yml runs it before building, and again with the built files.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
_WHERE = {
    "pyproject.toml": re.compile(r'^fallback_version = "([^"]+)"$', re.MULTILINE),
    "CITATION.cff": re.compile(r"^version: (\S+)$", re.MULTILINE),
    "deploy/helm/twofold/Chart.yaml": re.compile(r'^appVersion: "([^"]+)"$', re.MULTILINE),
    "deploy/kserve/inference-service.yaml": re.compile(r"^ +image: REGISTRY/twofold:(\S+)$", re.MULTILINE),
}
_BUILT = re.compile(r"^twofold-(?P<version>[^-]+)(?:-cp\d+-cp\d+-manylinux[\w.]+\.whl|\.tar\.gz)$")


def newest_release(changelog: str) -> tuple[str, str] | None:
    """(version, notes) of the newest dated section; None without one."""
    sections = list(_SECTION.finditer(changelog))
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        if section["date"] is not None:
            end = len(changelog) if following is None else following.start()
            return section["name"], changelog[section.end() : end].strip() + "\n"
    return None


def disagreements(root: Path, version: str, tag: str, built: Sequence[str]) -> list[str]:
    """What names another version than `version`. built: names of files to publish."""
    found = []
    for name, pattern in _WHERE.items():
        match = pattern.search((root / name).read_text(encoding="utf-8"))
        given = match[1] if match else "no version"
        if given != version:
            found.append(f"{name} has {given}; write {version}")
    if tag != f"v{version}":
        found.append(f"the tag is {tag}; expected v{version}")
    for name in built:
        match = _BUILT.match(name)
        if match is None:
            found.append(f"{name} is no manylinux wheel and no source archive of Twofold; leave it out")
        elif match["version"] != version:
            found.append(f"{name} has version {match['version']}; build it at the tag v{version}")
    return found


def tagged_elsewhere(root: Path, tag: str) -> bool:
    """Whether the tag is there and names another commit than the one checked out."""
    commits = [
        subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],
            cwd=root, capture_output=True, text=True, check=False,
        ).stdout
        for revision in (f"refs/tags/{tag}", "HEAD")
    ]  # fmt: skip
    return commits[0] not in ("", commits[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("built", nargs="*", type=Path, help="wheels and source archive to publish")
    parser.add_argument("--tag", help="tag to publish (default: that of the newest dated section)")
    parser.add_argument("--notes", type=Path, help="write the section's text here")
    options = parser.parse_args(argv)
    release = newest_release((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if release is None:
        print("CHANGELOG.md has no dated section; add '## [X.Y.Z] - YYYY-MM-DD'", file=sys.stderr)
        return 1
    version, notes = release
    tag = options.tag or f"v{version}"
    found = disagreements(ROOT, version, tag, [path.name for path in options.built])
    if tagged_elsewhere(ROOT, tag):
        found.append(f"{tag} names another commit already; add a dated section for a new version")
    for line in found:
        print(f"CHANGELOG.md's newest dated section is {version}, but {line}", file=sys.stderr)
    if found:
        return 1
    if options.notes is not None:
        options.notes.write_text(notes, encoding="utf-8")
    print(f"tag={tag}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
