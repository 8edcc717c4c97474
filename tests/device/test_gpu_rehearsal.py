"""`make test-gpu` and `make bench-gpu` rehearsed without a GPU: every check runs, on tiny shapes.

What is right on a GPU must be right here too; what is fast is not asked.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.device.fake_device import FakeDevice

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cuda(fake: ModuleType) -> FakeDevice:
    return FakeDevice(fake.open_device(0, total_bytes=2 << 30, tick_us=2.0))


def rehearse(cuda: FakeDevice, folder: Path, script: str) -> list[dict[str, Any]]:
    from benchmarks.gpu import __main__ as speed
    from benchmarks.gpu.machine import REHEARSAL, Machine
    from benchmarks.gpu.report import run_check
    from tests.gpu import checks as listed

    trace = folder / "trace.npz"
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((60, REHEARSAL.model_layers, 8)), axis=-1)[..., :4]
    np.savez(
        trace,
        ids=ids.astype(np.uint8),
        probs=np.full(ids.shape, 0.25, np.float16),
        offsets=np.array([0, 30, 60]),
    )
    machine = Machine(cuda, folder, REHEARSAL, trace)
    checks = listed.checks(REHEARSAL.formats) if script == "test" else speed.checks()
    # The same measurement with other numbers would only take longer.
    again = [f"*at {share}% slots*" for share in (10, 50, 75)] + ["decode * 8 tokens", "decode * 32 tokens"]
    checks = [pair for pair in checks if not any(fnmatch.fnmatch(pair[0], pattern) for pattern in again)]
    return [run_check(machine, *pair) for pair in checks]


STAND_IN = """
import functools, sys
import twofold_fake
from benchmarks.gpu import machine
from tests.device.fake_device import FakeDevice
from twofold.device import finding
finding.cuda_devices = lambda: ([{"name": "a stand-in"}], "")
finding.find_device = lambda index=0: (FakeDevice(twofold_fake.open_device()), "")
machine.Machine = functools.partial(machine.Machine, sizes=machine.REHEARSAL)
import pytest
from benchmarks.gpu.machine import expect
from tests.gpu import kernel_checks
def breaks(machine):
    raise RuntimeError("the device is gone")
kernel_checks.routing = breaks
kernel_checks.attention = lambda machine: expect({"us": 12.0}, False, "at most 10 us")
raise SystemExit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_check_that_fails_or_breaks_stops_no_other_and_all_are_reported(
    fake: ModuleType, tmp_path: Path
) -> None:
    """The command of `make test-gpu`, but for the build."""
    out = tmp_path / "out.json"
    flags = ["-m", "gpu", "tests/gpu", "-k", "test_on_a_gpu and (rout or rotation or probe)", "--gpu-json"]
    beside = str(Path(fake.__file__ or "").parent)
    path = os.pathsep.join([beside, os.environ.get("PYTHONPATH", ""), str(ROOT / "engine")])
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, *flags, str(out), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, out.exists()) == (1, True), done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    broken, slow, probe = report["checks"]
    assert report["device"] == {"name": "a stand-in"}
    assert broken["state"] == "error"
    assert "the device is gone" in broken["trace"]
    assert slow["state"] == "failed"
    assert slow["figures"] == {"us": 12.0, "expected": "at most 10 us", "holds": False}
    assert probe["state"] == "passed"


def test_no_check_begins_when_the_time_is_up(
    cuda: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu.report import Run

    monkeypatch.setattr("twofold.device.finding.find_device", lambda index=0: (cuda, ""))
    monkeypatch.setattr("twofold.device.finding.cuda_devices", lambda: ([{"name": "a stand-in"}], ""))
    run = Run(tmp_path / "out.json", budget_s=0.0)
    assert run.machine is not None
    assert run.check("late", lambda machine: {})["error"] == "the time was up"
    run.close()
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["checks"][0]["state"] == "not run"


def test_another_routing_is_noticed(cuda: FakeDevice, tmp_path: Path) -> None:
    """The comparison of logits can fail."""
    from benchmarks.gpu.machine import REHEARSAL, Machine
    from benchmarks.gpu.models import QWEN, drawn_trace
    from benchmarks.gpu.runs import TWOFOLD, loaded, make_runner
    from tests.gpu.engine_checks import LIMIT, error_of, told_logits

    machine = Machine(cuda, tmp_path, REHEARSAL)
    model = loaded(machine, QWEN)
    ours = told_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    model.trace = drawn_trace(model.shape, REHEARSAL.model_layers, seed=9)
    other = told_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    assert error_of(other, ours) > LIMIT


@pytest.mark.slow
def test_every_check_passes_on_the_kernels_own_sources(simt: ModuleType, tmp_path: Path) -> None:
    """Run by the SIMT machine."""
    cuda = FakeDevice(simt.open_device(0, total_bytes=2 << 30, tick_us=2.0))
    entries = rehearse(cuda, tmp_path, "test")
    assert {entry["name"]: entry for entry in entries if entry["state"] != "passed"} == {}
    assert all(entry["figures"].get("expected") for entry in entries if "probe" not in entry["name"])


@pytest.mark.slow
def test_every_measurement_comes_to_its_end(cuda: FakeDevice, tmp_path: Path) -> None:
    entries = rehearse(cuda, tmp_path, "bench")
    assert {entry["name"]: entry["trace"] for entry in entries if entry["state"] == "error"} == {}
    rules = next(entry for entry in entries if entry["name"] == "rules at 25% slots, gpt-oss-20b")
    assert rules["figures"]["trace"] == "trace.npz"
    assert set(rules["figures"]["over"]) == {
        "LRU, misses on the CPU",
        "all on the CPU",
        "every miss fetched",
        "fixed fraction fetched, one LRU pool",
    }
