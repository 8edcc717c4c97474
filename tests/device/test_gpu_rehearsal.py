"""`make test-gpu` and `make bench-gpu` rehearsed on the fake device: every check runs, on tiny shapes.

What is right on a GPU must be right here too; what is fast is not asked.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.device.fake_device import FakeDevice

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def cuda(fake: ModuleType) -> Iterator[FakeDevice]:
    sys.path.insert(0, str(SCRIPTS))
    yield FakeDevice(fake.open_device(0, total_bytes=2 << 30, tick_us=2.0))
    sys.path.remove(str(SCRIPTS))


def rehearse(cuda: FakeDevice, folder: Path, script: str) -> list[dict[str, Any]]:
    import gpu_bench
    import gpu_run
    import gpu_test
    from gpu.machine import REHEARSAL, Machine

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
    checks = gpu_test.checks(REHEARSAL.formats) if script == "test" else gpu_bench.checks()
    # The same measurement with other numbers would only take longer.
    again = [f"*at {share}% slots*" for share in (10, 50, 75)] + ["decode * 8 tokens", "decode * 32 tokens"]
    checks = [pair for pair in checks if not any(fnmatch.fnmatch(pair[0], pattern) for pattern in again)]
    return gpu_run.run_checks(machine, checks)


def test_a_check_that_fails_or_breaks_stops_no_other(cuda: FakeDevice, tmp_path: Path) -> None:
    import time

    import gpu_run
    from gpu.machine import REHEARSAL, Machine, expect

    def breaks(machine: Any) -> dict[str, Any]:
        raise RuntimeError("the device is gone")

    checks = [
        ("breaks", breaks),
        ("fails", lambda machine: expect({"us": 12.0}, False, "at most 10 us")),
        ("passes", lambda machine: expect({"us": 9.0}, True, "at most 10 us")),
    ]
    machine = Machine(cuda, tmp_path, REHEARSAL)
    states = [entry["state"] for entry in gpu_run.run_checks(machine, checks)]
    assert states == ["error", "failed", "passed"]
    late = gpu_run.run_checks(machine, checks, deadline=time.perf_counter())
    assert {entry["state"] for entry in late} == {"not run"}


def test_another_routing_is_noticed(cuda: FakeDevice, tmp_path: Path) -> None:
    """The comparison of logits can fail."""
    from gpu.engine_checks import LIMIT, error_of
    from gpu.machine import REHEARSAL, Machine
    from gpu.models import QWEN, drawn_trace
    from gpu.runs import TWOFOLD, loaded, make_runner, told_logits

    machine = Machine(cuda, tmp_path, REHEARSAL)
    model = loaded(machine, QWEN)
    ours = told_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    model.trace = drawn_trace(model.shape, REHEARSAL.model_layers, seed=9)
    other = told_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    assert error_of(other, ours) > LIMIT


def test_every_check_passes(cuda: FakeDevice, tmp_path: Path) -> None:
    entries = rehearse(cuda, tmp_path, "test")
    assert {entry["name"]: entry for entry in entries if entry["state"] != "passed"} == {}
    assert all(entry["figures"].get("expected") for entry in entries if "probe" not in entry["name"])


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
