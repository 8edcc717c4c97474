"""Packages of a machine with a card and no network, and the wheels that `serve` needs beyond them.

python -m tests.gpu.packages FOLDER    download those wheels, for Python 3.12 on Linux x86-64
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE: Final = ("torch", "pytest", "pybind11", "cmake", "ninja", "transformers")
"""What such a machine has, each with what it needs."""
ABSENT: Final = frozenset(
    ("fastapi", "uvicorn", "sqlalchemy", "alembic", "llguidance", "gguf", "psutil", "pydantic", "streamlit")
)
"""What it lacks, whatever the newest versions of the others need."""
IMPORTED_BY_SERVE: Final = ("fastapi", "uvicorn", "pydantic", "llguidance")
_SERVE: Final = ("twofold[server,telemetry]",)
_PYTHON: Final = "3.12"
_PLATFORMS: Final = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)))
"""Platforms of a C library up to 2.35, that of Ubuntu 22.04."""


def closure(names: Iterable[str], without: frozenset[str] = frozenset()) -> set[str]:
    """The installed distributions among these and all that they need, `without` some and what only they need."""
    todo = [Requirement(name) for name in names]
    found: dict[str, set[str]] = {}
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
        new = extras - found.get(name, set())
        if name in without or not new:
            continue
        try:
            needed = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.setdefault(name, set()).update(new)
        todo += [
            each
            for each in map(Requirement, needed)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in new)
        ]
    return set(found)


def make_environment(folder: Path) -> Path:
    """A virtual environment with links to this one's THERE and nothing else; its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    link_packages(closure(THERE, ABSENT), next(folder.glob("lib/python3*/site-packages")))
    return folder / "bin/python"


def link_packages(names: Iterable[str], site: Path) -> None:
    """Make these installed distributions importable from `site`."""
    for name in sorted(names):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def needed_by_serve() -> list[str]:
    """What `serve` needs beyond THERE."""
    return sorted(closure(_SERVE) - closure(THERE, ABSENT) - {"twofold"})


def download_wheels(folder: Path) -> None:
    """The wheels, at this environment's versions. CalledProcessError: pip could not get one."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    abis = ["--abi", "cp" + _PYTHON.replace(".", ""), "--abi", "abi3", "--abi", "none"]
    pip += ["--python-version", _PYTHON, "--implementation", "cp", *abis]
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in needed_by_serve()]
    subprocess.run([*pip, *platforms, "--dest", str(folder), *pins], check=True)
    wheels = list(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB in {folder}; give it as WHEELS= to make gpu-day")


if __name__ == "__main__":
    download_wheels(Path(sys.argv[1]))
