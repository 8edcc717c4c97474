"""`make test-gpu` and `make bench-gpu` on a machine without a GPU: they list everything and claim nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("twofold._core")

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ["pytest", "-m", "gpu", "tests/gpu", "--gpu-json"]
SPEED = ["benchmarks.gpu", "--json"]


def run(module: list[str], out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *module, str(out), *options]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "engine")])
    env = dict(os.environ, PYTHONPATH=path)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "option", "at_least"),
    [pytest.param(CHECKS, "--gpu-dry-run", 25, marks=pytest.mark.slow), (SPEED, "--dry-run", 20)],
)
def test_a_dry_run_lists_every_check_and_runs_none(
    tmp_path: Path, module: list[str], option: str, at_least: int
) -> None:
    out = tmp_path / "out.json"
    done = run(module, out, option)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert len(report["checks"]) >= at_least
    assert {check["state"] for check in report["checks"]} == {"not run"}
    assert len({check["name"] for check in report["checks"]}) == len(report["checks"])


@pytest.mark.parametrize(
    "module", [pytest.param(CHECKS, marks=pytest.mark.slow), [*SPEED[:1], "--no-build", *SPEED[1:]]]
)
def test_without_a_device_the_run_fails_and_says_why(tmp_path: Path, module: list[str]) -> None:
    from twofold.device.finding import find_device

    if find_device()[0] is not None:
        pytest.skip("there is a CUDA device here")
    out = tmp_path / "out.json"
    done = run(module, out)
    assert done.returncode == 3
    assert "nothing was run: " in done.stdout + done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["device"] is None


def test_what_is_to_be_sanitized_exists() -> None:
    from tests.gpu.checks import SANITIZED, checks

    assert set(SANITIZED) <= {name for name, _ in checks()}


def test_every_check_is_in_the_status_page() -> None:
    page = (ROOT / "docs/explanation/gpu-status.md").read_text(encoding="utf-8")
    for command in ("make test-gpu", "make sanitize-gpu", "make bench-gpu", "make check-cuda"):
        assert command in page
    # A figure in that page needs a commit beside it.
    for line in page.splitlines():
        if line.startswith("|") and re.search(r"\bpassed\b", line):
            assert re.search(r"`[0-9a-f]{7,}`", line), line
