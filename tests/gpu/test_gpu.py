"""Every check on a GPU as a test of its own: `make test-gpu` builds for the GPU at hand and runs these alone."""

from __future__ import annotations

import pytest

from benchmarks.gpu.report import Check, Run
from tests.gpu.checks import SANITIZED, checks

LISTED = [
    pytest.param(
        name, check, id=name, marks=[pytest.mark.gpu, *([pytest.mark.sanitized] if name in SANITIZED else [])]
    )
    for name, check in checks()
]


@pytest.mark.parametrize(("name", "check"), LISTED)
def test_on_a_gpu(gpu_run: Run, name: str, check: Check) -> None:
    entry = gpu_run.check(name, check)
    if entry["state"] == "not run":
        pytest.skip(entry["error"])
    if entry["state"] == "error":
        pytest.fail(entry["trace"], pytrace=False)
    assert entry["state"] == "passed", entry["figures"]
