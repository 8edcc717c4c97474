"""Workers that time a layer: turns, silence in between, and their end, whatever happens."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.peers.layers import LayerProcess, LayerSpec, running, take_turns
from benchmarks.peers.routing import balanced_routing, random_routing
from benchmarks.peers.shapes import FULL_SHAPES

TINY = FULL_SHAPES["tiny"]


def spec(python: str, way: str = "q4_0") -> LayerSpec:
    return LayerSpec("layer_worker.py", way, python)


def pids(python: str) -> list[int]:
    return [int(line) for line in Path(python + ".pids").read_text(encoding="utf-8").split()]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]


def test_every_turn_asks_every_worker_for_every_case(fake_layer_python) -> None:
    fast, slow = fake_layer_python("fast", one_s=0.001), fake_layer_python("slow", one_s=0.003)
    with running([spec(fast), spec(slow, "bf16")], TINY, 1, 8) as (processes, missing):
        found = take_turns(processes, [(1, 4), (8, 2)], 3, missing)
    assert missing == {}
    assert found["twofold q4_0", 1].seconds == [0.001] * 12
    assert found["twofold bf16", 8].seconds == [0.003 * 8 / 2] * 6
    assert found["twofold bf16", 8].touched == [8] * 6
    assert all(is_gone(pid) for pid in pids(fast) + pids(slow))


def test_a_worker_is_stopped_while_it_is_not_its_turn(fake_layer_python) -> None:
    python = fake_layer_python("worker")
    with LayerProcess(spec(python), {}) as process:
        (pid,) = pids(python)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert state(pid) == "T"
        assert process.measure(1, 2).seconds == [0.001, 0.001]
    assert is_gone(pid)


def test_one_that_fails_is_left_out_and_the_others_go_on(fake_layer_python) -> None:
    good, bad = fake_layer_python("good"), fake_layer_python("bad", fails_at=8)
    with running([spec(good), spec(bad, "bf16")], TINY, 1, 8) as (processes, missing):
        found = take_turns(processes, [(1, 1), (8, 1)], 2, missing)
    assert missing == {"twofold bf16": "twofold bf16 ended without an answer: out of luck"}
    assert len(found["twofold q4_0", 8].seconds) == 2
    assert len(found["twofold bf16", 1].seconds) == 1


def test_workers_end_when_the_measurement_breaks_off(fake_layer_python) -> None:
    python = fake_layer_python("worker")
    with pytest.raises(KeyboardInterrupt), running([spec(python)], TINY, 1, 8):
        raise KeyboardInterrupt
    assert all(is_gone(pid) for pid in pids(python))


def test_random_routing_gives_a_token_different_experts() -> None:
    ids = random_routing(random.Random(1), 200, 16, 4)
    assert all(len(set(row)) == 4 for row in ids)
    assert set(Counter(expert for row in ids for expert in row)) == set(range(16))


def test_balanced_routing_gives_every_expert_as_many_tokens() -> None:
    ids = balanced_routing(random.Random(1), 512, 128, 8)
    assert all(len(set(row)) == 8 for row in ids)
    assert set(Counter(expert for row in ids for expert in row).values()) == {32}
    with pytest.raises(ValueError, match="cannot be shared evenly"):
        balanced_routing(random.Random(1), 3, 128, 8)


@pytest.mark.parametrize("way", ["q4_0", "int4", "bf16"])
def test_a_real_layer_answers_orders(way: str) -> None:
    ours = LayerSpec("layer_worker.py", way)
    with running([ours], TINY, 1, 32) as (processes, missing):
        assert missing == {}
        found = take_turns(processes, [(1, 2), (4, 1)], 1, missing)
        evenly = take_turns(processes, [(32, 1)], 1, missing, balanced=True)
    assert found[ours.name, 1].touched == [2, 2]
    assert all(took > 0 for timing in found.values() for took in timing.seconds)
    assert evenly[ours.name, 32].touched == [TINY.experts]
