"""Runs of the program for a day on a GPU, with a stand-in for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ("--no-build", "--stand-in", "tests.gpu.stand_in", "--limit-times", "20")


def day_command(folder: Path, *options: str, python: str = sys.executable) -> list[str]:
    models = ["--models", str(folder.parent / "models")]
    return [python, "-m", "tests.gpu.day", "--folder", str(folder), *models, *options]


def environment(*paths: Path) -> dict[str, str]:
    """This process's, with these paths for Python alone."""
    return dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))


def read_report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu-day.json").read_text(encoding="utf-8"))
    return found


def wait_for_entries(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Until the report has so many, or the day is over."""
    while process.poll() is None:
        if (folder / "gpu-day.json").exists() and len(read_report(folder)["checks"]) >= count:
            return
        time.sleep(0.02)


def only_of(report: dict[str, Any]) -> str:
    """ONLY of the last command that the report names."""
    words: list[str] = shlex.split(report["run_next"][-1])
    return words[-1].removeprefix("ONLY=")
