"""Where the time of a step goes: the parts of every step of a real engine, as telemetry stores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.telemetry import queries
from twofold.telemetry.queries.step_times import StepTimes
from twofold.telemetry.writer import open_sink

from tests.telemetry.records import times_of_step

NATIVE = ("embed", "attention", "router", "experts_cpu", "head")


def steps_of(path: Path, accelerator: str) -> list[StepTimes]:
    """Step times of two answers by the bundled model."""
    url = f"sqlite:///{path / 't.db'}"
    sink = open_sink(url)
    engine = Engine.load(
        EngineConfig(
            model=str(bundled_model_path()),
            accelerator=accelerator,
            gpu_experts_ratio=None if accelerator == "none" else 0.25,
            policy="lru",
        ),
        telemetry=sink,
    )
    for prompt in (range(100, 400), range(500, 520)):
        engine.generate(
            tuple(prompt), SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
        )
    engine.close()
    sink.close()
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    found = [times_of_step(db, run, step) for step in range(80)]
    assert times_of_step(db, run, 10_000) is None
    return [times for times in found if times is not None]


@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_the_parts_are_the_step(tmp_path: Path, accelerator: str) -> None:
    steps = steps_of(tmp_path, accelerator)
    assert len(steps) >= 80
    for times in steps:
        assert min(times.parts_us.values()) >= 0
        assert sum(times.parts_us.values()) == pytest.approx(times.wall_us, rel=0.05)
        assert all(times.parts_us[name] > 0 for name in (*NATIVE, "schedule", "sampling", "emit"))
    shares = {name: np.median([t.parts_us[name] / t.wall_us for t in steps]) for name in steps[0].parts_us}
    print(f"\n{accelerator}, median step of {np.median([t.wall_us for t in steps]):.0f} µs:")
    print(", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    # 9 % here: Python between the parts. Without any of the larger parts it would be more than 15 %.
    assert shares["rest"] < 0.15, "what has a name is nearly all of a step"
    if accelerator == "none":
        assert all(not times.emulated_parts_us and times.emulated_us == 0 for times in steps)
        return
    for times in steps:
        assert min(times.emulated_parts_us.values()) >= 0
        assert sum(times.emulated_parts_us.values()) == pytest.approx(times.emulated_us, rel=1e-3)
        assert all(times.emulated_parts_us[name] > 0 for name in ("dense", "experts_gpu", "head"))
    assert sum(times.emulated_parts_us["experts_cpu"] for times in steps) > 0
    # What no layer overlaps: the link shows where uploads were waited for, which a prompt's chunk is sure to do.
    assert sum(times.emulated_parts_us["link"] for times in steps) > 0


def test_a_step_has_the_kernels_counters(tmp_path: Path) -> None:
    steps_of(tmp_path, "none")
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    run = queries.runs(db)[0]
    found = queries.step_counters(db, run, tuple(range(80)))
    assert sorted(found) == list(range(80))
    assert all(counters.engine_cpu_us is not None for counters in found.values())
    assert all(counters.collection_us is not None for counters in found.values())
    counted = [counters for counters in found.values() if counters.cpu_us is not None]
    assert len(counted) >= 80 // 32
    assert all(counters.involuntary_switches is not None for counters in counted)
    assert all(counters.major_faults is not None for counters in counted)
    # Each answer begins a count; the last steps may be counted by none.
    num_counted = sum(counters.num_counted_steps or 0 for counters in counted)
    assert 80 - 2 * 32 < num_counted <= 80
    # Steps that compute use processor time.
    wall_us = sum(each.wall_us for step in found if (each := times_of_step(db, run, step)) is not None)
    assert sum(counters.engine_cpu_us or 0.0 for counters in found.values()) > 0.05 * wall_us
