"""Experts in slots, kept by the reader: the same as asked of the tables, and no block read twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info
from tests.e2e.waiting import wait_until


def test_residents_are_those_of_the_tables_after_each_step(tmp_path: Path) -> None:
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}", now=clock)
    info = run_info(num_layers=3, num_experts=8, top_k=2, num_slots=9)
    made = SyntheticRun(sink, clock, info)
    db = None
    read = []
    for _ in range(4):
        made.submit(prompt_tokens=4, answer_tokens=15)
        made.run_steps(16, 1.0)
        wait_until(lambda: sink.stats().num_queued == 0)
        if db is None:
            db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
            run = queries.runs(db)[0]
            kept = queries.Residents(db, run)
        hits = np.zeros((info.num_layers, info.num_experts), np.int64)
        for step in (made.step - 7, made.step - 1):
            there = kept.after(step, hits)
            assert there is not None
            np.testing.assert_array_equal(there, queries.residency(db, run, step, hits))
        assert there.sum() == 9
        read.append(kept.num_blocks_read)
    sink.close()
    assert len(set(read)) == len(read), "each look reads the blocks since the one before"
    again = kept.after(made.step, hits)
    assert again is not None
    assert kept.num_blocks_read - read[-1] <= 1
    assert kept.after(0, hits) is None, "decisions after step 0 are in the sums already"


def test_experts_without_a_decision_are_there_if_they_were_hit(tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info(num_layers=1, num_experts=4, top_k=1, num_slots=2))
    sink.close()
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    there = queries.Residents(db, queries.runs(db)[0]).after(3, np.array([[0, 2, 0, 1]]))
    assert there is not None
    assert there.tolist() == [[0, 1, 0, 1]]
