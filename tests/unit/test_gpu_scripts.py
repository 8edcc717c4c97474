"""`make test-gpu` and `make bench-gpu` on a machine without a GPU: they list everything and claim nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("twofold._core")

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("script", "at_least"), [("gpu_test.py", 25), ("gpu_bench.py", 20)])
def test_a_dry_run_lists_every_check_and_runs_none(tmp_path: Path, script: str, at_least: int) -> None:
    out = tmp_path / "out.json"
    done = run(script, "--dry-run", "--json", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert len(report["checks"]) >= at_least
    assert {check["state"] for check in report["checks"]} == {"not run"}
    assert len({check["name"] for check in report["checks"]}) == len(report["checks"])


def test_without_a_device_the_run_fails_and_says_why(tmp_path: Path) -> None:
    from twofold.device.finding import cuda_devices

    found, _ = cuda_devices()
    if found:
        pytest.skip("there is a CUDA device here")
    out = tmp_path / "out.json"
    done = run("gpu_test.py", "--no-build", "--json", str(out))
    assert done.returncode == 3
    assert "nothing was run: " in done.stderr
    assert json.loads(out.read_text())["device"] is None


def test_every_check_is_in_the_status_page() -> None:
    page = (ROOT / "docs/gpu-status.md").read_text(encoding="utf-8")
    for command in ("make test-gpu", "make bench-gpu", "make check-cuda"):
        assert command in page
    # A figure in that page needs a commit beside it.
    for line in page.splitlines():
        if line.startswith("|") and re.search(r"\bpassed\b", line):
            assert re.search(r"`[0-9a-f]{7,}`", line), line
