"""Pages Placement, PCIe, Cache, Scheduler and Lab: their figures are those of SQL on the same file."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from twofold.api.types import StepRecord
from twofold.experts.profiles import load_profile
from twofold.telemetry import queries
from twofold.telemetry.sink import TelemetrySink
from twofold.telemetry.writer import open_sink

from dashboard import formats
from dashboard.explanation import cause
from tests.dashboard.app_pages import metrics, show, texts
from tests.dashboard.plotly_values import values_of
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, synthetic_history

NEW = ("placement", "pcie", "cache", "scheduler", "lab")
PROFILE = load_profile("rtx4090-pcie4")
MACHINE = json.dumps(
    {
        "name": PROFILE.name,
        "profile": {name: {"value": value, "source": "test"} for name, value in PROFILE.cost_figures.items()},
        "model_sizes": [256.0, 256.0, 16.0, 100_000.0, 1_000_000.0],
    }
)


def write(path: Path, accelerator: str, **changes: object) -> SyntheticRun:
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    info = run_info(accelerator, **{"machine_json": MACHINE, **changes})
    run = synthetic_history(sink, clock, seconds=8, info=info)
    sink.close()
    return run


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SyntheticRun]:
    path = tmp_path_factory.mktemp("emulated") / "t.db"
    return path, write(path, "emulated:rtx4090-pcie4")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "t.db"
    write(path, "cuda:0")
    return path


class OnCpu(TelemetrySink):
    """Passes on a run as if all experts ran on the CPU in 100 us a layer; layer 3 of SLOW_STEP took 660 times that."""

    SLOW_STEP = 45

    def __init__(self, sink: TelemetrySink) -> None:
        self.begin_run, self.request, self.close = sink.begin_run, sink.request, sink.close  # type: ignore[method-assign]
        self._sink = sink

    def step(self, record: StepRecord) -> None:
        slow = record.step == self.SLOW_STEP
        self._sink.step(record._replace(involuntary_switches=7 * slow, major_faults=0, cpu_us=1.0))

    def native_events(self, kind: str, rows: np.ndarray) -> None:
        if kind != "token_layer":
            return
        rows = rows.copy()
        rows["placement"], rows["num_hits"], rows["num_fetched"], rows["num_cpu"] = (
            queries.Placement.CPU,
            0,
            0,
            4,
        )
        slow = (rows["step"] == self.SLOW_STEP) & (rows["layer"] == 3)
        rows["layer_us"] = rows["cpu_us"] = np.where(slow, 66_000, 100)
        rows["gpu_us"] = rows["predicted_us"] = 0
        self._sink.native_events(kind, rows)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, clock = tmp_path_factory.mktemp("cpu") / "t.db", ManualClock()
    sink = OnCpu(open_sink(f"sqlite:///{path}", now=clock))
    info = run_info("none", machine_json=MACHINE, num_slots=0, policy="")
    synthetic_history(sink, clock, seconds=8, info=info)
    sink.close()
    return path


def one(path: Path, sql: str) -> tuple[float, ...]:
    with sqlite3.connect(path) as connection:
        (row,) = connection.execute(sql).fetchall()
    return tuple(row)


@pytest.mark.parametrize("page", NEW)
def test_each_chart_names_an_action(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun], page: str
) -> None:
    app = show(monkeypatch, emulated[0], page)
    advice = [element for element in app.get("html") if "tf-advice" in element.proto.body]
    assert len(advice) >= len(app.get("plotly_chart"))


def test_pcie_figures_are_sqls(monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]) -> None:
    path, made = emulated
    app = show(monkeypatch, path, "pcie")
    copies, size, busy_us = one(path, "SELECT count(*), sum(size_bytes), sum(end_us - begin_us) FROM upload")
    (clock_us,) = one(path, "SELECT sum(step_us) FROM step")
    shown = metrics(app)
    assert shown["Copies"] == f"{copies:,}" == f"{made.num_uploads:,}"
    assert shown["PCIe traffic (emulated)"] == f"{size / clock_us * 1e6 / 1e9:.2f} GB/s"
    assert 0 < float(shown["Link busy (emulated)"].rstrip("%")) <= 100 * busy_us / clock_us + 0.1
    # 393,216 bytes: 10 us of latency and 15.7 us at 25 GB/s.
    assert "back to back at most 15.28 of 25.0 GB/s" in texts(app)
    (steps,) = one(path, "SELECT count(*) FROM step")
    assert f"Covers {steps:,} steps from" in texts(app)
    assert f"and all {copies:,} copies that they decided." in texts(app)
    (waited,) = one(path, "SELECT avg(begin_us - queued_us) FROM upload")
    assert waited == pytest.approx(2.0)
    assert f"<td>{copies:,}</td>" in texts(app)
    assert "<td>2 µs</td>" in texts(app)


def test_a_limit_on_copies_stands_on_the_page(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    read = queries.copy_rows
    monkeypatch.setattr(queries, "copy_rows", lambda db, run, steps: read(db, run, steps, limit=40))
    monkeypatch.setattr(queries, "MAX_COPIES", 40)
    text = texts(show(monkeypatch, path, "pcie", window="15m"))
    (first,) = one(path, "SELECT min(step) FROM (SELECT step FROM upload ORDER BY step DESC LIMIT 40)")
    (steps,) = one(path, f"SELECT count(*) FROM step WHERE step >= {first}")
    assert f"Covers {steps:,} steps from" in text
    assert "only its latest 40 copies are read" in text


def test_the_ceiling_is_that_of_copies_back_to_back(monkeypatch: pytest.MonkeyPatch, cuda: Path) -> None:
    """A real link hides a copy's latency behind the copy before it, so only its bandwidth bounds it."""
    text = texts(show(monkeypatch, cuda, "pcie"))
    assert "Ceiling: the calibrated 25.0 GB/s of copies back to back." in text
    assert "alone at most 15.28 of 25.0 GB/s" in text


def test_a_link_without_figures_has_no_ceiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "t.db", "cuda:0", machine_json="{}")
    app = show(monkeypatch, tmp_path / "t.db", "pcie")
    assert "No ceiling is drawn" in texts(app)
    assert len(app.get("plotly_chart")) == 4


def test_cache_figures_are_sqls(monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]) -> None:
    path, made = emulated
    app = show(monkeypatch, path, "cache")
    hits, routed = one(path, "SELECT sum(num_hits), sum(num_routed) FROM token_layer")
    shown = metrics(app)
    assert shown["Hit rate"] == f"{hits / routed:.1%}"
    assert shown["Evictions"] == f"{made.num_evictions:,}"
    decoded = "token_layer JOIN step USING (run_id, step) WHERE layer = 0 AND num_prefill_tokens = 0"
    assert shown["Decode tokens analysed"] == f"{one(path, f'SELECT count(*) FROM {decoded}')[0]:,}"
    text = texts(app)
    for policy in ("lru", "two-in-eight", "payback", "oracle-payback"):
        assert f'<td class="tf-experts">{policy}</td>' in text


def test_the_replay_of_the_runs_own_policy_stands_beside_the_run(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    """The synthetic run's own LRU is not the engine's: how far its replay is off stands on the page."""
    path, _ = emulated
    text = texts(show(monkeypatch, path, "cache", window="all"))
    with sqlite3.connect(path) as connection:
        decodes = [
            step
            for step, prompt in connection.execute("SELECT step, num_prefill_tokens FROM step ORDER BY step")
            if not prompt
        ]
        (total,) = connection.execute("SELECT count(*) FROM step").fetchone()
        (middle,) = connection.execute(
            f"SELECT step FROM step ORDER BY step LIMIT 1 OFFSET {total // 2}"
        ).fetchone()
        counted = [step for step in decodes if step >= middle]
        uses = connection.execute(
            "SELECT DISTINCT step, layer, expert, placement FROM token_expert "
            f"WHERE step IN ({', '.join(map(str, counted))})"
        ).fetchall()
    rate = sum(place == "hit" for *_, place in uses) / len(uses)
    assert f"This run hit {rate:.1%} in its last {len(counted):,} decode steps" in text
    found = re.search(
        r"its policy hits \*\*([\d.]+)%\*\* in them: ([+-][\d.]+) percentage points, as (.+)\.", text
    )
    assert found is not None
    assert float(found[1]) - 100 * rate == pytest.approx(float(found[2]), abs=0.11)
    assert "time vs own policy" in text


def test_a_run_without_figures_is_replayed_without_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "t.db", "cuda:0", machine_json="{}")
    text = texts(show(monkeypatch, tmp_path / "t.db", "cache"))
    assert "does not reproduce this run" in text
    assert "the run recorded no figures of its machine or model" in text
    assert "cost vs LRU" in text


def test_each_hit_rate_names_its_scope(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    text = texts(show(monkeypatch, emulated[0], "cache"))
    for scope in (
        "all tokens of the window",
        "Hit rate over time, all tokens, %",
        "Hit rate by layer, all tokens, %",
        "Hit rate of distinct experts by layer and decode step",
        "Decode tokens one by one",
    ):
        assert scope in text, scope


def test_uses_per_upload_are_counted_by_sql(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    app = show(monkeypatch, path, "cache", window="all")
    db = queries.open_database(f"sqlite:///{path}")
    run = queries.runs(db)[0]
    rows = queries.layer_rows(db, run, queries.window(run))
    with sqlite3.connect(path) as connection:
        uploads = connection.execute("SELECT step, layer, expert, slot FROM upload").fetchall()
    hit_steps: dict[tuple[int, int], set[int]] = {}
    layers = rows.layers
    for step, layer, expert, place in zip(
        layers.use_step.tolist(),
        layers.use_layer.tolist(),
        layers.use_expert.tolist(),
        layers.use_placement.tolist(),
        strict=True,
    ):
        if place == queries.Placement.HIT:
            hit_steps.setdefault((layer, expert), set()).add(step)
    uses = []
    for at, (step, layer, expert, slot) in enumerate(uploads):
        end = next((later for later, _, _, other in uploads[at + 1 :] if other == slot), 10**9)
        uses.append(1 + sum(step < hit <= end for hit in hit_steps.get((layer, expert), ())))
    assert metrics(app)["Uses per upload"] == f"{np.mean(uses):.1f}"


def test_residency_follows_the_scrubber(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    app = show(monkeypatch, path, "placement")
    kinds = "SELECT sum(kind = 0) - sum(kind = 1) FROM cache_event"
    last = one(path, kinds)[0]
    assert f"{last:,} of 48 slots filled" in texts(app)
    steps = app.select_slider(key="placement-step").options
    early = int(steps[2].rpartition(" ")[2])
    (began_s,) = one(path, f"SELECT started_s FROM step WHERE step = {early}")
    assert steps[2] == f"{formats.moment(began_s)}, step {early:,}", "the slider goes by time"
    app = app.select_slider(key="placement-step").set_value(early).run()
    assert not app.exception
    filled = one(path, f"{kinds} WHERE step <= {early}")[0]
    assert f"{filled:,} of 48 slots filled" in texts(app)
    assert app.query_params["step"] == str(early)
    linked = show(monkeypatch, path, "placement", step=str(early), layer="3")
    assert f"After step {early:,} at" in texts(linked)
    assert linked.slider(key="one-layer").value == 3
    unknown = show(monkeypatch, path, "placement", step="99999", layer="77")
    assert "step `99999`, which is not here: the latest step is shown" in texts(unknown)
    assert "layer `77`, which is not here: layer 0 is shown" in texts(unknown)
    moved = unknown.slider(key="one-layer").set_value(2).run()
    assert "layer `77`" not in texts(moved), "told until the viewer chooses"


def test_placement_counts_experts_that_were_used(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    app = show(monkeypatch, path, "placement")
    assert app.radio(key="colour").value == "Share of hits"
    for mode in ("Where it ran most", "How often used"):
        app = app.radio(key="colour").set_value(mode).run()
        assert not app.exception
    hits, routed = one(path, "SELECT sum(num_hits), sum(num_routed) FROM token_layer")
    assert metrics(app)["On GPU, hit"] == f"{hits / routed:.1%}"


def test_many_experts_are_coloured_by_their_share_of_hits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.db"
    write(path, "cuda:0", num_layers=2, num_experts=160, num_slots=80)
    app = show(monkeypatch, path, "placement")
    assert app.radio(key="colour").options == ["Share of hits", "How often used"]
    (chart,) = [each for each in app.get("plotly_chart") if each.proto.id.endswith("-grid")]
    depth = values_of(json.loads(chart.proto.spec)["data"][0]["z"]).reshape(2, 160)
    with sqlite3.connect(path) as connection:
        found = connection.execute(
            "SELECT layer, expert, avg(placement = 'hit') FROM token_expert GROUP BY layer, expert"
        ).fetchall()
    for layer, expert, share in found:
        assert depth[layer, expert] == int(1 + 249 * share)
    assert (depth > 0).sum() == len(found)


def test_the_hottest_experts_are_sqls(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    table = show(monkeypatch, path, "placement").dataframe[0].value
    assert (np.diff(table["uses"]) <= 0).all()
    where = "WHERE layer = ? AND expert = ?"
    for row in table.head(5).to_dict("records"):
        key = (row["layer"], row["expert"])
        with sqlite3.connect(path) as connection:
            ((uses, hits),) = connection.execute(
                f"SELECT count(*), sum(placement = 'hit') FROM token_expert {where}", key
            ).fetchall()
            ((uploads,),) = connection.execute(f"SELECT count(*) FROM upload {where}", key).fetchall()
        assert (row["uses"], row["uploads"]) == (uses, uploads)
        assert row["hit rate, %"] == round(100 * hits / uses, 1)


def test_scheduler_figures_are_sqls(monkeypatch: pytest.MonkeyPatch, cuda: Path) -> None:
    app = show(monkeypatch, cuda, "scheduler")
    (layers,) = one(
        cuda,
        "SELECT count(DISTINCT step * 1000 + layer) FROM token_layer JOIN step USING (run_id, step) "
        "WHERE num_prefill_tokens = 0",
    )
    shown = metrics(app)
    assert shown["Layers of decode steps"] == f"{layers:,}"
    assert 0 < float(shown["Misses fetched"].rstrip("%")) < 100
    assert len(app.get("plotly_chart")) == 4
    assert "No prices" not in texts(app)
    other = app.selectbox(key="plan").options[1]
    app = app.selectbox(key="plan").select_index(1).run()
    assert not app.exception
    assert "misses" in other


def test_an_emulated_run_has_no_estimates_to_compare(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    app = show(monkeypatch, emulated[0], "scheduler")
    assert "a layer takes exactly the predicted time" in texts(app)
    assert len(app.get("plotly_chart")) == 2


@pytest.mark.parametrize("page", NEW)
def test_a_cpu_only_run_shows_no_link_and_no_hits(
    monkeypatch: pytest.MonkeyPatch, cpu: Path, page: str
) -> None:
    app = show(monkeypatch, cpu, page)
    shown = metrics(app)
    assert not any("PCIe" in label or "Hit rate" in label or label == "Slots" for label in shown)
    assert "waited for the CPU" not in texts(app)
    if page in ("placement", "pcie", "scheduler"):
        # Per layer: 4 distinct experts of 393,216 bytes in 100 us, but for the slow one.
        assert float(shown["Expert weights read"].split()[0]) < 4 * 393_216 / 100 / 1e3
        assert shown["Threads"] == "2"
    if page in ("placement", "pcie", "scheduler", "cache"):
        assert "not apply" in texts(app)


def test_a_slow_layer_is_attributed_to_another_process(monkeypatch: pytest.MonkeyPatch, cpu: Path) -> None:
    app = show(monkeypatch, cpu, "scheduler")
    text = texts(app)
    assert "<td>3</td><td>66.0 ms</td><td>100 µs</td><td>660</td>" in text
    assert "probably another process: the kernel took a core from the server 7 times" in text


def test_causes_by_counters() -> None:
    counters = queries.StepCounters
    assert "no kernel counters" in cause(None)
    assert "no kernel counters" in cause(counters(None, None, None))
    assert "read from disk" in cause(counters(9, 3, 1.0))
    assert "no counter explains" in cause(counters(0, 0, 1.0))


def pressed(app: AppTest, label: str) -> AppTest:
    (button,) = [each for each in app.button if each.label == label]
    return button.click().run()


def test_the_lab_replays_and_plans(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    app = show(monkeypatch, emulated[0], "lab")
    assert not app.get("plotly_chart"), "nothing is computed before it is asked for"
    app = pressed(app, "Replay")
    assert not app.exception
    assert '<td class="tf-experts">oracle-payback</td>' in texts(app)
    app = pressed(app, "Which GPU would I need?")
    assert not app.exception
    (answer,) = [each.value for each in app.success]
    assert "For 20 tokens/s of twofold-tales, take an **RTX " in answer
    assert "Confidence: **" in answer
    (box,) = [each for each in app.selectbox if each.label == "Model"]
    box.set_value("qwen3-30b-a3b-q4")
    app = pressed(app, "Which GPU would I need?")
    (answer,) = [each.value for each in (*app.success, *app.warning) if "qwen3-30b-a3b-q4" in each.value]
    assert "routing drawn after another model's" in answer or "None of these cards" in answer
    app.number_input[2].set_value(10_000.0)
    app = pressed(app, "Simulate")
    assert not app.exception
    assert len(app.get("plotly_chart")) == 3


def test_the_lab_without_sizes_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "t.db", "cuda:0", machine_json="{}")
    app = show(monkeypatch, tmp_path / "t.db", "lab")
    assert "sizes of this run's model were not recorded" in texts(app)
    assert not app.exception
