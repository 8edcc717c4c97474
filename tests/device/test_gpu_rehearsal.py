"""The day with a GPU rehearsed without one: every check runs, on tiny shapes.

What is right on a GPU must be right here too; what is fast is not asked.
"""

from __future__ import annotations

import fnmatch
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.device.fake_device import FakeDevice
from tests.device.gpu_day_runs import (
    ROOT,
    STAND_IN,
    day_command,
    environment,
    only_of,
    read_report,
    wait_for_entries,
)
from tests.gpu import packages
from tests.gpu.checks import NUMBERS, Check, checks

AGAIN = ("*at 10% slots*", "*at 50% slots*", "*at 75% slots*", "decode * 8 tokens", "decode * 32 tokens")
"""The same measurement with other numbers; these would only take longer."""


def rehearsed() -> list[Check]:
    return [check for check in checks() if not any(fnmatch.fnmatch(check.name, each) for each in AGAIN)]


@pytest.fixture(scope="module")
def cuda(fake: ModuleType) -> FakeDevice:
    return FakeDevice(fake.open_device(0, total_bytes=2 << 30, tick_us=2.0))


@pytest.mark.slow
def test_a_day_that_is_killed_twice_resumes(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at 30 % and at 70 %; each time the report says what is known, and the command that runs the rest."""
    python = str(packages.make_environment(tmp_path / "env"))
    server = tmp_path / "server"  # in the place of the wheels, which are those of another Python
    server.mkdir()
    packages.link_packages(packages.needed_by_serve(), server)
    tool = tmp_path / "env/bin/compute-sanitizer"
    tool.write_text('#!/bin/sh\nshift 2\nexec "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    names = [check.name for check in rehearsed()]
    only, entries = "; ".join(names), {}
    for number, share in enumerate((0.3, 0.4, 1.0)):
        folder = tmp_path / f"out{number}"
        started = day_command(folder, *STAND_IN, "--minutes", "9", "--only", only, python=python)
        with subprocess.Popen(started, cwd=ROOT, env=environment(server)) as process:
            wait_for_entries(folder, round(share * len(names)), process)
            process.kill()
        report = read_report(folder)
        entries |= {entry["name"]: entry for entry in report["checks"]}
        assert len(list(folder.iterdir())) <= 8
        assert report["not_known"] == [name for name in names if name not in entries]
        only = only_of(report)
    kinds = {check.name: check.kind for check in checks()}
    bad = {
        name: entry
        for name, entry in entries.items()
        if entry["state"] != "passed" and (kinds[name] == NUMBERS or entry["state"] != "failed")
    }
    assert bad == {}
    assert {*entries} == {*names}


def test_another_routing_is_detected(cuda: FakeDevice, tmp_path: Path) -> None:
    """The comparison of logits can fail."""
    from benchmarks.gpu.machine import REHEARSAL, Machine
    from benchmarks.gpu.models import QWEN, drawn_trace
    from benchmarks.gpu.runs import TWOFOLD, loaded, make_runner
    from tests.gpu.engine_checks import LIMIT, error_of, scripted_logits

    machine = Machine(cuda, tmp_path, REHEARSAL)
    model = loaded(machine, QWEN)
    ours = scripted_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    model.trace = drawn_trace(model.shape, REHEARSAL.model_layers, seed=9)
    other = scripted_logits(machine, model, make_runner(machine, model, TWOFOLD, 0.5, "graph"), 1)
    assert error_of(other, ours) > LIMIT


def test_a_deep_model_repeats_the_layers_on_disk(cuda: FakeDevice, tmp_path: Path) -> None:
    from dataclasses import replace

    from benchmarks.gpu.machine import REHEARSAL, Machine
    from benchmarks.gpu.models import QWEN, model_files, shrunk

    shape = shrunk(replace(QWEN, layers=48), REHEARSAL.shrink)
    files = model_files(Machine(cuda, tmp_path, REHEARSAL), shape)
    assert len(files.config.layers) == shape.layers == 2 * REHEARSAL.model_layers
    up = [np.asarray(files.expert_weights(layer)[3][1].data) for layer in range(shape.layers)]
    assert np.array_equal(up[0], up[2])
    assert np.array_equal(up[1], up[3])
    assert not np.array_equal(up[0], up[1])


@pytest.mark.slow
def test_every_number_is_right_on_the_kernels_own_sources(simt: ModuleType, tmp_path: Path) -> None:
    """Dense layers too, run by the SIMT machine."""
    from benchmarks.gpu.machine import REHEARSAL, Machine
    from tests.gpu.worker import run_check

    machine = Machine(FakeDevice(simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)), tmp_path, REHEARSAL)
    entries: list[dict[str, Any]] = [
        run_check(machine, check, 500.0)
        for check in rehearsed()
        if check.kind == NUMBERS and check.part in ("basics", "rest")
    ]
    assert {entry["name"]: entry for entry in entries if entry["state"] != "passed"} == {}
    assert all(entry["figures"].get("expected") for entry in entries if "probe" not in entry["name"])


def test_recorded_routing_is_used_where_it_fits(cuda: FakeDevice, tmp_path: Path) -> None:
    from benchmarks.gpu.machine import REHEARSAL, Machine
    from benchmarks.gpu.models import GPT_OSS, QWEN, shrunk, trace_for

    random, file = np.random.default_rng(0), tmp_path / "trace.npz"
    ids = np.argsort(random.random((60, REHEARSAL.model_layers, 8)), axis=-1)[..., :4]
    probs = np.full(ids.shape, 0.25, np.float16)
    np.savez(file, ids=ids.astype(np.uint8), probs=probs, offsets=np.array([0, 30, 60]))
    machine = Machine(cuda, tmp_path, REHEARSAL, file)
    sources = [trace_for(machine, shrunk(shape, REHEARSAL.shrink)).source for shape in (GPT_OSS, QWEN)]
    assert sources == ["trace.npz", "drawn"]
