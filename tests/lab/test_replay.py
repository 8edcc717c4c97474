"""`twofold lab replay`: rows, their arithmetic, and what payback promises."""

from __future__ import annotations

import json
import re

import pytest
from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.policies import POLICIES
from twofold.tools.cli.main import main
from twofold.tools.lab.replay import replay_policy, replay_rows
from twofold.tools.lab.trace import load_trace

ONLINE = [policy.name for policy in _core.cache_policies() if not policy.offline]


def test_rows_are_misses_and_uploads_at_their_price(trace_file):
    trace = load_trace(trace_file)
    for row in replay_rows(trace, ["payback", "belady"], [0.25, 0.5], [1, 2], 0.67):
        counts = replay_policy(
            trace.part("second"), row["policy"], slots=row["slots"], price=0.67, batch=row["batch"]
        )
        lru = replay_policy(trace.part("second"), "lru", slots=row["slots"], price=0.67, batch=row["batch"])
        assert row["hit_rate"] == counts.num_hits / (counts.num_hits + counts.num_misses)
        assert row["uploads_per_token"] == counts.num_uploads / 1200
        cost, base = (c.num_misses + 0.67 * c.num_uploads for c in (counts, lru))
        assert row["cost_vs_lru"] == pytest.approx(cost / base)
        assert row["offline"] == (row["policy"] == "belady")


@pytest.mark.parametrize("price", [0.25, 0.67, 2.0])
def test_payback_is_the_best_online_policy(long_trace_file, price):
    rows = list(replay_rows(load_trace(long_trace_file), ONLINE, [0.1, 0.25, 0.5, 0.75], [1], price))
    for slots in (0.1, 0.25, 0.5, 0.75):
        cost = {r["policy"]: r["cost_vs_lru"] for r in rows if r["slots"] == slots}
        assert cost["payback"] < 1.0
        assert cost["payback"] <= min(cost.values()) * 1.01, (slots, cost)


def test_belady_hits_most_and_the_bounds_cost_least(trace_file):
    rows = list(replay_rows(load_trace(trace_file), list(POLICIES), [0.25, 0.5], [1], 0.67))
    for slots in (0.25, 0.5):
        hits = {r["policy"]: r["hit_rate"] for r in rows if r["slots"] == slots}
        cost = {r["policy"]: r["cost_vs_lru"] for r in rows if r["slots"] == slots}
        assert max(hits, key=hits.__getitem__) == "belady"
        assert min(cost, key=cost.__getitem__) in ("oracle-payback", "belady")


def test_pool_or_fixed_slots(trace_file):
    trace = load_trace(trace_file)

    def cost(policy: str, pool: bool | None) -> float:
        (row,) = replay_rows(trace, [policy], [0.25], [1], 0.67, shared_pool=pool)
        return row["cost_vs_lru"]

    assert cost("lru", None) == cost("lru", False) == 1
    assert cost("lru", True) != 1
    assert cost("payback", None) == cost("payback", True) != cost("payback", False)


def test_static_learns_from_the_other_half(trace_file):
    (row,) = replay_rows(load_trace(trace_file), ["static"], [0.5], [1], 0.67)
    (own,) = replay_rows(load_trace(trace_file), ["static"], [0.5], [1], 0.67, part="all")
    assert row["uploads_per_token"] == own["uploads_per_token"] == 0
    assert row["hit_rate"] < own["hit_rate"], "trained on what it is tested on"


def test_warm_up_is_not_counted(trace_file):
    (cold,) = replay_rows(load_trace(trace_file), ["payback"], [0.5], [1], 0.67)
    (warm,) = replay_rows(load_trace(trace_file), ["payback"], [0.5], [1], 0.67, warm=True)
    assert warm["uploads_per_token"] < cold["uploads_per_token"]


def test_command_line(trace_file, synthetic_model, tmp_path, capsys):
    arguments = ["lab", "replay", str(trace_file), "--policies", "lru,payback", "--slots", "0.25,0.5"]
    assert main([*arguments, "--batch", "1,2", "--price", "0.5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 8
    keys = {"trace", "batch", "slots", "policy", "price", "hit_rate", "uploads_per_token", "cost_vs_lru"}
    assert all(keys <= set(row) for row in rows)
    assert {row["price"] for row in rows} == {0.5}
    assert all(row["cost_vs_lru"] == 1 for row in rows if row["policy"] == "lru")

    assert main([*arguments, "--profile", "rtx4090-pcie4", "--model", synthetic_model, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert 0.2 < rows[0]["price"] < 1
    assert rows[0]["upload_bytes_per_token"] == rows[0]["uploads_per_token"] * 3 * 2880 * 2880 * 4.25 / 8

    page = tmp_path / "page.html"
    assert main([*arguments, "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<polyline") == 2
    assert "payback" in text
    assert main(arguments) == 0
    assert "cost vs LRU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--policies", "lur"], "policy 'lur' is unknown; expected one of payback, lru"),
        (["--price", "-1"], "--price -1.0 given"),
        (["--price", "nan"], "--price nan given"),
        (["--profile", "rtx4090-pcie4"], "model 'synthetic' .* are not known; give --model"),
        (["--profile", "rtx9999", "--model", "mixtral-8x7b"], "'rtx9999' is unknown"),
        (["--num-experts", "3"], "holds expert 31, but there are 3 experts"),
        (["--html", "/nowhere/page.html"], "--html /nowhere/page.html"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(trace_file, extra, message, capsys):
    assert main(["lab", "replay", str(trace_file), "--policies", "lru", *extra]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.parametrize(
    "extra", [["--slots", "1.5"], ["--slots", "x"], ["--batch", "0"], ["--json", "--html", "x"]]
)
def test_bad_arguments_are_refused_by_the_parser(trace_file, extra, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["lab", "replay", str(trace_file), *extra])
    assert stopped.value.code == 2
    capsys.readouterr()


def test_unknown_policy_in_the_function(trace_file):
    with pytest.raises(ConfigError, match="policy 'x' given"):
        replay_policy(load_trace(trace_file), "x", slots=0.5, price=0.67)
