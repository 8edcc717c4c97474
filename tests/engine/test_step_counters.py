"""What is counted with a step: collections and processor time of this step alone, other counters often enough."""

from __future__ import annotations

import gc
import time

import pytest
from twofold.engine.step_counters import CounterReader, StepCounters


@pytest.fixture
def reader() -> CounterReader:
    found = CounterReader()
    found.begin()
    return found


def read(reader: CounterReader, wall_s: float, *, takes_s: float = 0.0) -> StepCounters:
    """takes_s: time that the reading takes at least."""
    reader.begin()
    return reader.read(wall_s, time.perf_counter() - takes_s)


def compute(duration_s: float) -> None:
    end_s = time.thread_time() + duration_s
    while time.thread_time() < end_s:
        pass


def test_a_slow_step_has_a_count_and_the_steps_that_it_covers(reader: CounterReader) -> None:
    usual = [read(reader, 1e-3) for _ in range(10)]
    assert all(each.cpu_us is None for each in usual), "steps as usual are counted together"
    slow = read(reader, 50e-3)
    assert slow.num_counted_steps == 11
    assert None not in slow[:-1]
    assert [read(reader, 1e-3).num_counted_steps for _ in range(32)] == [None] * 31 + [32]


def test_counting_takes_a_small_share_of_slow_steps(reader: CounterReader) -> None:
    """Below 5 ms; a long step does not feel it."""
    for _ in range(100):
        read(reader, 1e-3)
    walls_s = [1e-3 * (1 + number % 2) for number in range(400)]
    found = [read(reader, wall_s, takes_s=150e-6) for wall_s in walls_s]
    assert 1 <= sum(each.cpu_us is not None for each in found) < 30
    assert all(read(reader, 20e-3).cpu_us is not None for _ in range(3))


def test_a_collection_and_processor_time_are_the_steps_own(reader: CounterReader) -> None:
    read(reader, 1e-3)
    compute(0.02)
    gc.collect()
    step, following = read(reader, 30e-3), read(reader, 1e-3)
    assert (step.num_full_collections, following.num_full_collections) == (1, 0)
    assert 0 < (step.collection_us or 0) < 10e6
    assert following.collection_us == 0
    assert (step.engine_cpu_us or 0) >= 20e3
    assert (following.engine_cpu_us or 0) < 20e3


def test_what_happens_while_the_engine_is_idle_is_no_steps(reader: CounterReader) -> None:
    read(reader, 1e-3)
    reader.pause()
    compute(0.02)
    gc.collect()
    step = read(reader, 50e-3)
    assert (step.engine_cpu_us or 0) < 20e3
    assert step.collection_us == 0
    assert step.num_counted_steps == 1
    assert (step.cpu_us or 0) < 20e3
