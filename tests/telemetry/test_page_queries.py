"""Queries of the pages PCIe, Cache and Scheduler: against SQL on a synthetic run, and on rows worked out by hand."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.api.types import ControlRecord
from twofold.telemetry import queries
from twofold.telemetry.queries.layer_rows import LayerRows, StepRows
from twofold.telemetry.sink import CACHE_EVENT_DTYPE, CacheEventKind, Placement, UploadReason
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, synthetic_history


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SyntheticRun]:
    path, clock = tmp_path_factory.mktemp("telemetry") / "t.db", ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    run = synthetic_history(sink, clock, seconds=8)
    sink.close()
    return path, run


@pytest.fixture
def db(history: tuple[Path, SyntheticRun]) -> queries.Database:
    return queries.open_database(f"sqlite:///{history[0]}")


@pytest.fixture
def run(db: queries.Database) -> queries.Run:
    return queries.runs(db)[0]


@pytest.fixture
def rows(db: queries.Database, run: queries.Run) -> queries.LayerRows:
    return queries.layer_rows(db, run, queries.window(run))


def sql(history: tuple[Path, SyntheticRun], query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(history[0]) as connection:
        return connection.execute(query).fetchall()


def step_rows(num: int, *, begin_us: float = 0.0) -> StepRows:
    """`num` decode steps of one token that take 100 us of the run's clock each, one a second."""
    return StepRows(
        np.arange(num),
        np.arange(num, dtype=float),
        np.ones(num, np.int64),
        np.ones(num, bool),
        np.full(num, 100.0),
        np.full(num, 200.0),
        begin_us + 100.0 * np.arange(num),
    )


def routed(tokens: list[list[tuple[int, Placement]]], *, num_experts: int = 8) -> LayerRows:
    """One layer, one token a step: the experts of each step with their placements."""
    num, width = len(tokens), len(tokens[0])
    times = np.full(num, 50.0)
    return LayerRows(
        num_layers=1,
        num_experts=num_experts,
        steps=step_rows(num),
        step=np.arange(num),
        request=np.zeros(num, np.int64),
        position=np.arange(num),
        layer=np.zeros(num, np.int64),
        layer_us=times,
        cpu_us=times,
        gpu_us=times,
        predicted_us=times,
        experts=np.array([[expert for expert, _ in token] for token in tokens], np.int32),
        placement=np.array([[place for _, place in token] for token in tokens], np.uint8),
        weights=np.full((num, width), 0.5, np.float32),
    )


def copies(*found: tuple[int, int, int, UploadReason]) -> queries.CopyRows:
    """Copies (step, expert, slot, reason) of 1,000 bytes in layer 0: each waits 5 us and takes 10 us."""
    step, expert, slot, reason = (np.array(column, np.int64) for column in zip(*found, strict=True))
    queued, zeros = step * 100.0, step * 0
    times = queued, queued + 5, queued + 15
    return queries.CopyRows(step, zeros, expert, slot, zeros + 1000, *times, reason, zeros, zeros)


def test_layer_rows_are_the_tables_rows(history: tuple[Path, SyntheticRun], rows: queries.LayerRows) -> None:
    (found,) = sql(
        history,
        "SELECT count(*), sum(layer_us), sum(num_hits), count(DISTINCT step * 1000 + layer) FROM token_layer",
    )
    assert len(rows) == found[0]
    assert rows.layer_us.sum() == pytest.approx(found[1])
    assert int((rows.placement == Placement.HIT).sum()) == found[2]
    assert len(rows.layers) == found[3]
    assert rows.experts.shape == (len(rows), 4)


def test_a_bounded_reading_has_the_latest_whole_steps(
    history: tuple[Path, SyntheticRun], db: queries.Database, run: queries.Run, rows: queries.LayerRows
) -> None:
    some = queries.layer_rows(db, run, queries.window(run), max_rows=200)
    assert 0 < len(some) <= 200
    assert some.steps.step[-1] == rows.steps.step[-1]
    first = int(some.steps.step[0])
    (count,) = sql(history, f"SELECT count(*) FROM token_layer WHERE step >= {first}")
    assert len(some) == count[0]
    assert len(queries.layer_rows(db, run, queries.Window(0, 1))) == 0


def test_rows_are_split_by_steps_and_tokens(rows: queries.LayerRows) -> None:
    before, after = rows.halves()
    assert len(before) + len(after) == len(rows)
    assert before.step.max() < after.step.min()
    assert abs(len(before.steps) - len(after.steps)) <= 1
    before, after = rows.halves(max_tokens=4)
    assert 0 < int(after.steps.num_tokens.sum()) <= 4
    assert after.step[-1] == rows.step[-1]
    assert before.step.max() < after.step.min()
    assert int(before.steps.num_tokens.sum() + after.steps.num_tokens.sum()) <= 20
    assert set(before.step) == set(before.steps.step)


def test_an_expert_of_several_tokens_counts_once() -> None:
    hit, cpu = Placement.HIT, Placement.CPU
    rows = routed([[(1, hit), (2, cpu)], [(1, hit), (3, cpu)]])
    merged = LayerRows(**{**rows.__dict__, "step": np.zeros(2, np.int64)})
    assert (merged.layers.num_hits.tolist(), merged.layers.num_cpu.tolist()) == ([1], [2])
    assert sorted(merged.layers.use_expert.tolist()) == [1, 2, 3]


def test_copies_by_reason_are_the_tables(
    history: tuple[Path, SyntheticRun], db: queries.Database, run: queries.Run
) -> None:
    steps = queries.step_rows(db, run, queries.window(run))
    found = queries.copies_by_reason(queries.copy_rows(db, run, steps))
    expected = sql(
        history,
        "SELECT reason, count(*), sum(size_bytes), sum(end_us - begin_us) FROM upload GROUP BY reason",
    )
    shown = [
        (t.reason, t.num_copies, t.num_bytes, pytest.approx(t.copying_us)) for t in found if t.num_copies
    ]
    assert shown == expected
    assert len(queries.copy_rows(db, run, steps, limit=5)) == 5


def test_the_links_share_and_rate_are_those_of_the_steps_time() -> None:
    demand, prefetch = UploadReason.DEMAND, UploadReason.PREFETCH
    made = copies((0, 1, 0, demand), (0, 2, 1, prefetch), (2, 3, 2, demand))
    found = queries.link_series(made, step_rows(4), max_buckets=2)
    # Steps 0 and 1: two copies that ran at the same time, 10 us of 200 us.
    assert found.busy_share.tolist() == pytest.approx([0.05, 0.05])
    assert found.bytes_per_clock_s[demand].tolist() == pytest.approx([5e6, 5e6])
    assert found.bytes_per_clock_s[prefetch].tolist() == pytest.approx([5e6, 0])
    assert found.at_s.tolist() == [0, 2]
    unknown = queries.link_series(made, step_rows(4, begin_us=float("nan")), max_buckets=2)
    assert unknown.bytes_per_clock_s.tolist() == found.bytes_per_clock_s.tolist()


def test_a_copy_counts_while_it_runs() -> None:
    """Ten copies of 10 us, decided at the end of step 0, run in step 1: no bucket exceeds what the link can copy."""
    made = copies(*((0, expert, expert, UploadReason.ADMISSION) for expert in range(10)))
    begin = 100.0 + 10.0 * np.arange(10)
    made = queries.CopyRows(**{**made.__dict__, "begin_us": begin, "end_us": begin + 10})
    found = queries.link_series(made, step_rows(2), max_buckets=2)
    assert found.busy_share.tolist() == pytest.approx([0.0, 1.0])
    assert found.bytes_per_clock_s[UploadReason.ADMISSION].tolist() == pytest.approx([0.0, 1e8])


def test_a_ceiling_falls_with_the_copys_size() -> None:
    link = queries.LinkCeiling(latency_us=10.0, bandwidth_gbps=25.0)
    assert float(link.bytes_per_s(250_000.0)) == pytest.approx(12.5e9)  # 10 us of latency, 10 us of copying
    assert float(link.bytes_per_s(1e12)) == pytest.approx(25e9, rel=1e-3)


def test_an_upload_is_tracked_until_its_slot_is_reused() -> None:
    hit, cpu, fetched = Placement.HIT, Placement.CPU, Placement.FETCHED
    demand, admission = UploadReason.DEMAND, UploadReason.ADMISSION
    rows = routed([[(1, fetched)], [(1, hit)], [(1, hit)], [(1, cpu)], [(5, cpu)]])
    made = copies((0, 1, 0, demand), (1, 4, 1, admission), (2, 2, 0, admission), (3, 6, 1, admission))
    found = queries.paybacks(made, rows)
    # Expert 1: its own step, and steps 1 and 2; the copy of expert 2 takes its slot. Expert 4 loses its slot unused.
    assert found.num_uses.tolist() == [3, 0, 0, 0]
    outcome = queries.UploadOutcome
    assert found.outcome.tolist() == [outcome.USED, outcome.WASTED, outcome.WAITING, outcome.WAITING]
    assert found.count(admission, outcome.WASTED) == 1


def test_residency_at_any_step(tmp_path: Path) -> None:
    admit, evict = CacheEventKind.ADMIT, CacheEventKind.EVICT
    reported = [(2, admit, 1), (4, evict, 1), (4, admit, 2), (6, evict, 3), (6, admit, 1)]
    events = np.zeros(len(reported), CACHE_EVENT_DTYPE)
    events["step"], events["kind"], events["expert"] = (
        list(column) for column in zip(*reported, strict=True)
    )
    events["at_us"] = np.arange(len(reported))
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info(num_layers=1, num_experts=5))
    sink.native_events("cache_event", events)
    sink.close()
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    run = queries.runs(db)[0]
    hits = np.array([[7, 9, 0, 3, 0]])  # 0 was there from the start, 3 until step 6, 4 never

    def there(step: int) -> list[int]:
        return queries.residency(db, run, step, hits)[0].tolist()

    assert there(1) == [1, 0, 0, 1, 0]
    assert there(3) == [1, 1, 0, 1, 0]
    assert there(4) == [1, 0, 1, 1, 0]
    assert there(6) == [1, 1, 1, 0, 0]


def test_residency_over_many_blocks(tmp_path: Path) -> None:
    """As one decision after another would have it, whatever the blocks, with a step in two of them."""
    rng = np.random.default_rng(3)
    events = np.zeros(20_000, CACHE_EVENT_DTYPE)
    events["step"], events["at_us"] = np.arange(20_000) // 7, np.arange(20_000)
    events["kind"] = rng.integers(0, len(CacheEventKind), 20_000)
    events["layer"], events["expert"] = rng.integers(0, 3, 20_000), rng.integers(0, 400, 20_000)
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info(num_layers=3, num_experts=400, num_slots=1200))
    sink.native_events("cache_event", events)
    sink.close()
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    hits = rng.integers(0, 2, (3, 400))
    for step in (0, 585, 1500, 2857):
        expected = hits > 0
        for event in reversed(events):  # decisions to come, the next one of an expert last
            if event["step"] > step and event["kind"] in (CacheEventKind.ADMIT, CacheEventKind.EVICT):
                expected[event["layer"], event["expert"]] = event["kind"] == CacheEventKind.EVICT
        for event in events[events["step"] <= step]:
            if event["kind"] in (CacheEventKind.ADMIT, CacheEventKind.EVICT):
                expected[event["layer"], event["expert"]] = event["kind"] == CacheEventKind.ADMIT
        found = queries.residency(db, queries.runs(db)[0], step, hits)
        assert (found == expected).all()


@pytest.mark.parametrize("grown", [False, True])
def test_residency_reads_back_until_the_slots_are_filled(tmp_path: Path, *, grown: bool) -> None:
    """Expert 3 was admitted before a thousand others: two slots cannot hold it any more, a hundred may."""
    events = np.zeros(10_001, CACHE_EVENT_DTYPE)
    events["step"], events["at_us"] = np.arange(10_001), np.arange(10_001)
    events["kind"] = np.tile([CacheEventKind.ADMIT, CacheEventKind.EVICT], 5001)[:-1]
    events["expert"] = 10 + np.arange(10_001) // 2 % 40
    events["kind"][:3] = events["kind"][-2:] = CacheEventKind.ADMIT
    events["expert"][:3], events["expert"][-2:] = (3, 4, 5), (7, 8)
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info(num_layers=1, num_experts=50, num_slots=2))
    if grown:
        sink.control(ControlRecord(0.0, "resize", 100, 1))
    sink.native_events("cache_event", events)
    sink.close()
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    run, hits = queries.runs(db)[0], np.ones((1, 50), np.int64)
    kept = queries.Residents(db, run).after(10_000, hits)
    assert kept is not None
    for there in (kept, queries.residency(db, run, 10_000, hits)):
        assert there[0, 7] == there[0, 8] == 1
        assert there[0, 3] == grown


def test_every_hit_of_a_run_was_resident_before(
    db: queries.Database, run: queries.Run, rows: queries.LayerRows
) -> None:
    layers = rows.layers
    hits = np.zeros((6, 32), np.int64)
    chosen = layers.use_placement == Placement.HIT
    np.add.at(hits, (layers.use_layer[chosen], layers.use_expert[chosen]), 1)
    for step in (5, 30, 60):
        there = queries.residency(db, run, step - 1, hits)
        now = chosen & (layers.use_step == step)
        assert now.any()
        assert there[layers.use_layer[now], layers.use_expert[now]].all()


def lru_hits(ids: np.ndarray, slots: int) -> int:
    """Hits of one LRU list per layer that admits everything, by brute force."""
    hits = 0
    for layer in range(ids.shape[1]):
        order: list[int] = []
        for token in ids[:, layer].tolist():
            hits += sum(expert in order[:slots] for expert in token)
            order = token + [expert for expert in order if expert not in token]
    return hits


def test_stack_distances_are_an_lru_cache_of_every_size() -> None:
    rng = np.random.default_rng(5)
    ids = np.argsort(rng.random((200, 3, 12)) * np.arange(1, 13), axis=2)[:, :, :2].astype(np.uint16)
    routing = queries.RecordedRouting(
        ids,
        np.ones(ids.shape, np.float32),
        np.array([0, 200]),
        num_experts=12,
        batch=1,
        num_hits=0,
        num_uses=0,
    )
    counts = queries.stack_distances(routing)
    assert counts.sum() == ids.size
    rates = queries.lru_hit_rate(counts)
    for slots in (1, 3, 5, 9, 12):
        assert rates[slots] * ids.size == pytest.approx(lru_hits(ids, slots))


def test_the_routing_has_every_decode_token_once(
    db: queries.Database, run: queries.Run, rows: queries.LayerRows, history: tuple[Path, SyntheticRun]
) -> None:
    routing = queries.recorded_routing(rows)
    query = (
        "SELECT count(*), count(DISTINCT request) FROM token_layer JOIN step USING (run_id, step) "
        "WHERE layer = 0 AND num_prefill_tokens = 0"
    )
    assert [(routing.num_tokens, len(routing.offsets) - 1)] == sql(history, query)
    assert routing.ids.shape[1:] == (6, 4)
    assert routing.offsets[-1] == routing.num_tokens
    assert 0 < routing.hit_rate < 1
    request = rows.request[np.isin(rows.step, rows.steps.step[rows.steps.is_decode])].min()
    first = (rows.request == request) & np.isin(rows.step, rows.steps.step[rows.steps.is_decode])
    order = np.lexsort((rows.layer[first], rows.position[first]))[:6]
    np.testing.assert_array_equal(routing.ids[0], rows.experts[first][order])


def test_the_plan_mix_counts_every_layer_of_decode_steps(rows: queries.LayerRows) -> None:
    hit, cpu, fetched = Placement.HIT, Placement.CPU, Placement.FETCHED
    some = routed(
        [[(1, hit), (2, cpu)], [(1, fetched), (2, cpu)], [(3, cpu), (4, cpu)], [(1, hit), (2, hit)]]
    )
    assert queries.plan_mix(some.layers).tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0]]
    (usual, *_) = queries.usual_plans(some.layers)
    assert (usual.num_hits, usual.num_misses, usual.fetched.tolist()) == (0, 2, [1, 1, 0])
    assert int(queries.plan_mix(rows.layers).sum()) == int(rows.layers.is_decode.sum())


def test_residuals_and_slow_layers_by_hand() -> None:
    rows = routed([[(1, Placement.CPU)]] * 10)
    times = np.array([100.0, 110, 90, 100, 100, 100, 100, 100, 100, 66_000])
    rows = LayerRows(**{**rows.__dict__, "layer_us": times, "predicted_us": np.full(10, 100.0)})
    found = queries.layer_residuals(rows.layers, 1)
    assert found.p50.tolist() == pytest.approx([0.0])
    (slow,) = queries.slow_layers(rows)
    assert (slow.step, slow.layer, slow.ratio) == (9, 0, pytest.approx(660))


def test_the_cpus_bandwidth_is_bytes_over_its_time() -> None:
    rows = routed([[(1, Placement.CPU), (2, Placement.CPU)], [(1, Placement.CPU), (2, Placement.HIT)]])
    found = queries.cpu_bandwidth(rows, expert_bytes=1_000_000)
    assert found.by_layer.tolist() == pytest.approx([30.0])  # median of 2 MB and 1 MB in 50 us
    assert found.gbps == pytest.approx(30.0)
    assert found.over_time.tolist() == pytest.approx([40.0, 20.0])


def test_a_run_without_figures_has_no_ceiling(run: queries.Run) -> None:
    assert queries.run_costs(run) is None
    profile = {
        "link_latency_us": {"value": 10, "source": ""},
        "link_bandwidth_gbps": {"value": 25, "source": ""},
    }
    text = json.dumps({"name": "m", "profile": profile, "model_sizes": [1, 2, 3, 4, 5]})
    run = queries.Run(**{**run.__dict__, "machine_json": text})
    costs = queries.run_costs(run)
    assert costs is not None
    assert (costs.machine, costs.link.bandwidth_gbps) == ("m", 25)
    assert queries.model_sizes(run) == (1, 2, 3, 4, 5)
