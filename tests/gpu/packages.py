"""Packages of a machine with a card and no network, and the wheels that `serve` needs beyond them.

python -m tests.gpu.packages FOLDER    download those wheels, for Python 3.12 on Linux x86-64
"""

from __future__ import annotations

import importlib.metadata
import os
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
_SERVE: Final = ("twofold[server,telemetry]",)
_PYTHON, _PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")


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
    python = folder / "bin/python"
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in sorted(closure(THERE, ABSENT)):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


def needed_wheels() -> list[str]:
    """`name==version` of what `serve` needs beyond THERE, at the versions of this environment."""
    beyond = closure(_SERVE) - closure(THERE, ABSENT) - {"twofold"}
    return [f"{name}=={importlib.metadata.version(name)}" for name in sorted(beyond)]


def download_wheels(folder: Path) -> None:
    """The wheels, for a machine with Python 3.12. CalledProcessError: pip could not get one."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += [
        "--python-version",
        _PYTHON,
        "--implementation",
        "cp",
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    subprocess.run(
        [*pip, *platforms, "--dest", str(folder), *needed_wheels()], check=True, env=dict(os.environ)
    )
    wheels = list(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB in {folder}; give it as WHEELS= to make gpu-day")


if __name__ == "__main__":
    download_wheels(Path(sys.argv[1]))
