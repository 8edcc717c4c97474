"""The measured number of threads: the choice, its cache, and a busy machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from twofold.fit import threads


@pytest.mark.parametrize(
    ("us", "cores", "expected"),
    [
        ({1: 100.0, 2: 60.0, 4: 59.0}, 2, 2),  # hardware threads gain too little
        ({1: 100.0, 2: 60.0, 4: 40.0}, 2, 4),
        ({7: 50.0, 8: 70.0}, 8, 7),  # another program holds a core
        ({8: 0.0}, 8, 8),
    ],
)
def test_cores_unless_another_count_is_clearly_faster(
    us: dict[int, float], cores: int, expected: int
) -> None:
    assert threads.choose(us, cores) == expected


def test_candidates() -> None:
    assert threads.candidates(1, 1) == [1]
    assert threads.candidates(2, 2) == [1, 2]
    assert threads.candidates(8, 16) == [4, 7, 8, 16]


def test_a_measurement_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "twofold" / "threads.json"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(threads, "measure", lambda counts: dict.fromkeys(counts, 5.0))
    first = threads.measured_threads(path)
    assert set(json.loads(path.read_text())["us"]) == {str(count) for count in first.us}
    monkeypatch.setattr(threads, "measure", lambda counts: pytest.fail("measured twice"))
    assert threads.measured_threads(path) == first
    assert "fastest of a measured" in first.reason
    path.write_text("{")
    monkeypatch.setattr(threads, "measure", lambda counts: dict.fromkeys(counts, 6.0))
    assert set(threads.measured_threads(path).us.values()) == {6.0}


def test_a_busy_machine_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(threads, "measure", lambda counts: pytest.fail("measured"))
    choice = threads.measured_threads(tmp_path / "threads.json")
    assert "other programs are running" in choice.reason
    assert not (tmp_path / "threads.json").exists()


def test_a_real_measurement_gives_a_time_for_each_count() -> None:
    us = threads.measure([1, 2], budget_s=0.05)
    assert all(0 < each < 1e7 for each in us.values())
    assert list(us) == [1, 2]
