"""What the wheel holds, by scikit-build-core's own reading of pyproject.toml; tests/e2e/test_wheel.py builds one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from scikit_build_core.build._pathutil import packages_to_file_mapping
from scikit_build_core.settings.skbuild_read_settings import SettingsReader
from twofold.api.errors import ConfigError
from twofold.tools.cli.apps.folders import app_folder

ROOT = Path(__file__).resolve().parents[2]
APPS = ("dashboard", "loadtest")


def files_of(state: str) -> dict[str, Path]:
    """Sources in the wheel by their place in site-packages."""
    settings = SettingsReader.from_file(ROOT / "pyproject.toml", {}, state=state).settings  # type: ignore[arg-type]
    packages = settings.wheel.packages
    assert packages is not None
    table = packages if isinstance(packages, dict) else {Path(p).name: p for p in packages}
    found = packages_to_file_mapping(
        packages=table,
        platlib_dir=Path("site"),
        include=settings.sdist.include,
        src_exclude=settings.sdist.exclude,
        target_exclude=settings.wheel.exclude,
        build_dir="build",
        mode=settings.sdist.inclusion_mode or "default",
    )
    return {Path(target).relative_to("site").as_posix(): Path(source) for source, target in found.items()}


@pytest.mark.parametrize("app", APPS)
def test_the_wheel_holds_every_file_of_the_programs_beside_the_package(
    app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", app],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {f"twofold/apps/{name}" for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    assert len(expected) > 5
    in_wheel = {name for name in files_of("wheel") if name.startswith(f"twofold/apps/{app}/")}
    assert expected - in_wheel == set()
    assert not [name for name in in_wheel if "__pycache__" in name]


def test_an_editable_installation_takes_them_from_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not [name for name in files_of("editable") if name.startswith("twofold/apps")]
    assert [app_folder(app) for app in APPS] == [ROOT / app for app in APPS]
    with pytest.raises(ConfigError, match="install Twofold again"):
        app_folder("nothing-of-that-name")


def test_their_modules_import_where_the_wheel_puts_them(tmp_path: Path) -> None:
    """In a process of its own, from another folder; only the folder above them is on the path."""
    apps = tmp_path / "apps"
    apps.mkdir()
    for app in APPS:
        (apps / app).symlink_to(ROOT / app)
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for app in APPS
        for path in (ROOT / app).rglob("*.py")
        if "pages" not in path.as_posix() and path.name not in ("app.py", "main.py")  # scripts of Streamlit
    )
    # Locust first: it replaces parts of the standard library.
    script = f"import locust, importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint('all')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(apps)},
    )
    assert done.stdout == "all\n", done.stderr


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0", "3.14.0"])
def test_every_pinned_package_accepts_the_oldest_release_of_each_python(python: str) -> None:
    """Debian 12 has Python 3.11.2: a package that requires a later patch release could not be installed there."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    installed = [each for each in importlib.metadata.distributions() if each.name.lower() in pins]
    assert len(installed) > 50
    required = {each.name: each.metadata.get("Requires-Python") or ">=3" for each in installed}
    assert {name: given for name, given in required.items() if python not in SpecifierSet(given)} == {}
