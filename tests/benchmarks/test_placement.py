"""The table of placement strategies: its order on skewed routing, and what is written."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from twofold.experts.profiles import load_profile
from twofold.tools.lab.shapes import SHAPES
from twofold.tools.lab.trace import Trace, make_trace

from benchmarks.placement import STRATEGIES, forced_rows, markdown, write_csv

LAYERS, EXPERTS, TOP_K, TOKENS, SEQUENCES = 4, 16, 2, 200, 8


def skewed() -> Trace:
    """Some experts are popular everywhere, others in one sequence; none of them among the first."""
    rng = np.random.default_rng(1)
    base = 1.5 * rng.normal(size=(LAYERS, EXPERTS))
    base[:, :5] -= 1
    rows = []
    for _ in range(SEQUENCES):
        topic = base + 1.5 * rng.normal(size=base.shape)
        noise = rng.gumbel(size=(TOKENS, *base.shape))
        rows.append(np.argsort(-(topic + noise), axis=2)[:, :, :TOP_K])
    offsets = np.arange(0, SEQUENCES * TOKENS + 1, TOKENS)
    return make_trace("skewed", np.concatenate(rows), None, offsets, EXPERTS)


def test_strategies_differ_as_expected_in_every_record(tmp_path: Path) -> None:
    rows = list(forced_rows(skewed(), SHAPES["gpt-oss-20b"], load_profile("rtx4090-pcie4"), [0.0, 0.4, 1.0]))
    found = {(row.strategy, row.ratio): row for row in rows}
    speed = {key: row.decode_tokens_per_s for key, row in found.items()}
    for ratio in (0.0, 1.0):  # nothing or everything is in slots: there is nothing to decide
        assert len({round(speed[strategy, ratio], 6) for strategy in STRATEGIES}) == 1
    for above, below in (("frequency", "uniform"), ("dynamic", "uniform"), ("payback", "frequency")):
        assert speed[above, 0.4] > 1.02 * speed[below, 0.4]
    assert found["dynamic", 0.4].hit_rate > found["uniform", 0.4].hit_rate
    assert found["uniform", 0.0].hit_rate == 0 < found["uniform", 1.0].hit_rate == 1
    write_csv(rows, tmp_path / "placement.csv")
    read = list(csv.DictReader((tmp_path / "placement.csv").open(encoding="utf-8")))
    assert [(row["strategy"], float(row["decode_tokens_per_s"])) for row in read] == [
        (row.strategy, row.decode_tokens_per_s) for row in rows
    ]
    assert f"| payback | {speed['payback', 0.0]:.1f} | {speed['payback', 0.4]:.1f} |" in markdown(rows)
