"""`twofold lab oracle-share`: the arithmetic, and what a start is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from twofold.tools.cli.main import main
from twofold.tools.lab.oracle_share import first_tokens, share_rows
from twofold.tools.lab.replay import replay_rows
from twofold.tools.lab.trace import load_trace


def test_shares_are_of_the_cheapest_offline_policy(trace_file):
    trace = load_trace(trace_file).part("second")
    names = ["payback", "lru", "belady", "oracle-payback"]
    cost = {
        pool: {
            row["policy"]: row["cost_vs_lru"]
            for row in replay_rows(trace, names, [0.25], [1], 0.67, part="all", shared_pool=pool)
        }
        for pool in (False, True)
    }
    oracle = min(cost[False]["belady"], cost[False]["oracle-payback"])
    pooled = min(oracle, cost[True]["belady"], cost[True]["oracle-payback"])
    payback, lru, belady = share_rows(trace, ["payback", "lru", "belady"], [0.25], 0.67)
    assert payback["cost_vs_lru"] == pytest.approx(cost[True]["payback"])
    assert payback["share"] == pytest.approx((1 - cost[True]["payback"]) / (1 - oracle))
    assert payback["share_pooled"] == pytest.approx((1 - cost[True]["payback"]) / (1 - pooled))
    assert (lru["share"], lru["cost_vs_lru"]) == (0, 1)
    assert belady["share"] == pytest.approx((1 - cost[False]["belady"]) / (1 - oracle))


def test_starts_are_spread_and_continue_with_the_next_sequence(trace_file):
    trace = load_trace(trace_file)
    length = int(trace.offsets[1])
    starts = first_tokens(trace, length + 5, num_starts=2)
    assert len(starts) == 2
    assert list(starts[0].offsets) == [0, length, length + 5]
    half = int(trace.offsets[trace.num_sequences // 2])
    assert np.array_equal(starts[1].ids, trace.ids[half : half + length + 5])
    assert first_tokens(trace, trace.num_tokens + 1) == []


def test_no_share_where_lru_is_optimal(trace_file):
    (row,) = share_rows(load_trace(trace_file), ["lru"], [1.0], 0.0)
    assert row["share"] is None


def test_command_line(trace_file, capsys):
    arguments = ["lab", "oracle-share", str(trace_file), "--slots", "0.25", "--tokens", "20"]
    assert main([*arguments, "--json"]) == 0
    assert [row["span"] for row in json.loads(capsys.readouterr().out)] == ["all", "first 20"]
    assert main(arguments) == 0
    assert "first 20" in capsys.readouterr().out
