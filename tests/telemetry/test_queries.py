"""Queries against a run whose figures are known, because the test made it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.api.types import StepRecord
from twofold.telemetry import queries
from twofold.telemetry.sink import TOKEN_LAYER_DTYPE, CacheEventKind, Placement, UploadReason
from twofold.telemetry.summary import format_summary, summarise
from twofold.telemetry.writer import open_sink
from twofold.tools.cli import telemetry as cli

from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, synthetic_history
from tests.telemetry import table_queries

SECONDS = 12


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, SyntheticRun]:
    url, clock = f"sqlite:///{tmp_path_factory.mktemp('telemetry') / 't.db'}", ManualClock()
    sink = open_sink(url, now=clock)
    run = synthetic_history(sink, clock, seconds=SECONDS)
    run.load_samples("lt-1", 40, failures=3)
    sink.close()
    return url, run


@pytest.fixture
def made(history: tuple[str, SyntheticRun]) -> SyntheticRun:
    return history[1]


@pytest.fixture
def db(history: tuple[str, SyntheticRun]) -> queries.Database:
    return queries.open_database(history[0])


@pytest.fixture
def run(db: queries.Database) -> queries.Run:
    (run,) = queries.runs(db)
    return run


def test_the_run_is_what_was_announced(run: queries.Run) -> None:
    assert run.model == "twofold-tales"
    assert run.emulated
    assert run.clock == "virtual"
    assert (run.num_layers, run.num_experts, run.top_k) == (6, 32, 4)


def test_overview_of_the_whole_run_has_every_token(
    db: queries.Database, run: queries.Run, made: SyntheticRun
) -> None:
    view = table_queries.overview(db, run, queries.window(run))
    assert view.steps.num_decode_tokens == made.decode_tokens
    assert view.steps.num_prefill_tokens == made.prefill_tokens
    assert view.steps.num_steps == made.step
    totals = view.totals
    assert (totals.num_hits, totals.num_cpu, totals.num_fetched) == (
        made.num_hits,
        made.num_cpu,
        made.num_fetched,
    )
    assert totals.num_uploads == made.num_uploads
    assert totals.upload_bytes == made.num_uploads * made.info.expert_bytes
    assert float(np.sum(view.decode_tokens_per_s) * view.bucket_s) == pytest.approx(made.decode_tokens)
    assert float(np.sum(view.upload_bytes_per_s) * view.bucket_s) == pytest.approx(totals.upload_bytes)
    assert view.clock_s == pytest.approx(made.virtual_us / 1e6)


def test_windows_add_up_to_the_whole(db: queries.Database, run: queries.Run, made: SyntheticRun) -> None:
    whole = queries.window(run)
    middle = whole.begin_s + 5
    parts = [queries.Window(whole.begin_s, middle), queries.Window(middle, whole.end_s)]
    views = [table_queries.overview(db, run, part) for part in parts]
    assert sum(view.steps.num_decode_tokens for view in views) == made.decode_tokens
    assert all(view.steps.num_decode_tokens > 0 for view in views)
    assert sum(view.totals.num_hits for view in views) == made.num_hits
    grids = [table_queries.placement_grid(db, run, part).uses for part in parts]
    np.testing.assert_array_equal(sum(grids), table_queries.placement_grid(db, run, whole).uses)


def test_long_windows_have_few_points(db: queries.Database, run: queries.Run, made: SyntheticRun) -> None:
    view = table_queries.overview(db, run, queries.window(run), max_buckets=4)
    assert len(view.at_s) <= 4
    assert view.steps.num_decode_tokens == made.decode_tokens


def test_a_live_run_ends_before_the_current_second(run: queries.Run) -> None:
    values = {"finished_s": None, "last_seen_s": run.started_s + 100, "is_written": None}
    live = queries.Run(**{**run.__dict__, **values})
    now_s = run.started_s + 101.7
    assert live.is_live(now_s)
    assert queries.window(live, 30, now_s=now_s) == queries.Window(int(now_s) - 30, int(now_s))
    assert not live.is_live(now_s + 60)
    assert queries.window(live, 30, now_s=now_s + 60).end_s == int(live.last_seen_s) + 1


def test_the_grid_counts_every_use(db: queries.Database, run: queries.Run, made: SyntheticRun) -> None:
    grid = table_queries.placement_grid(db, run, queries.window(run))
    assert grid.uses.shape == (6, 32, 3)
    assert int(grid.total.sum()) == made.num_rows * made.info.top_k
    assert grid.by_placement(Placement.HIT) == made.num_hits
    assert grid.by_placement(Placement.CPU) == made.num_cpu
    assert grid.by_placement(Placement.FETCHED) == made.num_fetched


def test_the_dominant_placement_is_the_most_frequent_one() -> None:
    uses = np.zeros((1, 4, 3), np.int64)
    uses[0, 1] = 1, 5, 2
    uses[0, 2] = 1, 2, 5
    uses[0, 3] = 5, 1, 2
    grid = queries.PlacementGrid(uses)
    assert grid.dominant.tolist() == [[queries.UNUSED, Placement.CPU, Placement.FETCHED, Placement.HIT]]
    assert grid.dominant.dtype == np.uint8
    assert np.isnan(grid.hit_share[0, 0])
    assert grid.hit_share[0, 3] == pytest.approx(5 / 8)


def test_requests_are_kept_once_with_their_last_state(
    db: queries.Database, run: queries.Run, made: SyntheticRun
) -> None:
    requests = queries.requests(db, run)
    assert [request.number for request in requests] == list(range(made.next_number))[::-1]
    assert {request.finish_reason for request in requests} == {"stop"}
    assert queries.request_counts(db, run) == queries.RequestCounts(made.next_number, made.next_number, 0, 0)


def test_tokens_of_a_request_are_returned_unchanged(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    rng = np.random.default_rng(3)
    rows = np.zeros(3 * 6, TOKEN_LAYER_DTYPE)
    rows["step"], rows["request"] = np.repeat([0, 0, 1], 6), 7
    rows["position"], rows["layer"] = np.repeat([0, 1, 2], 6), np.tile(np.arange(6), 3)
    rows["num_routed"] = rng.integers(1, 5, 18)  # a model may route unevenly
    rows["experts"] = rng.integers(0, 32, (18, 16))
    rows["placement"] = rng.integers(0, len(Placement), (18, 16))
    rows["weights"] = rng.random((18, 16))
    rows["layer_us"], rows["predicted_us"] = rng.random(18), rng.random(18)
    others = rows.copy()
    others["request"] = 8
    sink = open_sink(url)
    sink.begin_run(run_info())
    sink.native_events("token_layer", others)
    sink.native_events("token_layer", rows)
    sink.close()
    db = queries.open_database(url)
    tokens = queries.request_tokens(db, queries.runs(db)[0], 7)
    assert tokens.position.tolist() == [0, 1, 2]
    assert tokens.step.tolist() == [0, 0, 1]
    assert np.isnan(tokens.step_us).all(), "no step rows were sent"
    for row in rows:
        at, count = (row["position"], row["layer"]), int(row["num_routed"])
        np.testing.assert_array_equal(tokens.experts[at][:count], row["experts"][:count])
        np.testing.assert_array_equal(tokens.placement[at][:count], row["placement"][:count])
        np.testing.assert_array_equal(tokens.weights[at][:count], row["weights"][:count])
        assert (tokens.experts[at][count:] == -1).all()
        assert tokens.layer_us[at] == row["layer_us"]
        assert tokens.predicted_us[at] == row["predicted_us"]
    assert len(queries.request_tokens(db, queries.runs(db)[0], 7, first_position=2).position) == 1


def test_a_request_that_does_not_exist_has_no_tokens(db: queries.Database, run: queries.Run) -> None:
    assert len(queries.request_tokens(db, run, 123_456).position) == 0


def test_uploads_and_decisions_by_step(db: queries.Database, run: queries.Run, made: SyntheticRun) -> None:
    copies = queries.uploads(db, run)
    assert len(copies) == made.num_uploads
    reasons = [copy.reason for copy in copies]
    assert queries.upload_counts(db, run) == {reason: reasons.count(reason) for reason in UploadReason}
    some = queries.uploads(db, run, first_step=3, last_step=5)
    assert some
    assert {upload.step for upload in some} <= {3, 4, 5}
    assert all(upload.end_us > upload.begin_us >= upload.queued_us for upload in some)
    assert queries.cache_event_counts(db, run)[CacheEventKind.EVICT] == made.num_evictions
    evictions = [e for e in table_queries.cache_events(db, run) if e.kind == CacheEventKind.EVICT]
    assert len(evictions) == made.num_evictions


def test_load_tests(db: queries.Database, run: queries.Run) -> None:
    (test,) = queries.load_tests(db)
    assert (test.loadtest_id, test.run_id, test.num_samples, test.num_failures) == ("lt-1", run.run_id, 40, 3)
    samples = queries.load_samples(db, "lt-1")
    assert int(np.isnan(samples.ttft_ms).sum()) == 3
    assert samples.errors == ["HTTP 503"] * 3
    assert samples.stage == ["ramp"] * 20 + ["hold"] * 20
    assert [name == "impatient" for name in samples.name] == samples.gave_up.tolist()
    assert samples.gave_up.sum() == 4
    is_whole = ~np.isnan(samples.tpot_ms)
    assert is_whole.sum() == 40 - 3 - 4
    assert samples.itl_p95_ms[is_whole] == pytest.approx(1.5 * samples.tpot_ms[is_whole])
    assert (np.diff(samples.finished_s) >= 0).all()


def test_percentiles_by_time() -> None:
    at_s = np.repeat(np.arange(100.0), 10)
    values = np.tile(np.arange(10.0), 100)
    values[::10] = np.nan
    series = queries.percentile_series(at_s, values, max_buckets=50)
    assert len(series.at_s) == 50
    assert series.p50.tolist() == [5.0] * 50
    assert (series.p50 <= series.p95).all()
    assert (series.p95 <= series.p99).all()
    assert len(queries.percentile_series(at_s[:0], values[:0]).at_s) == 0
    assert len(queries.percentile_series(at_s[:1], np.array([np.nan])).at_s) == 0


def test_readers_cannot_write(db: queries.Database) -> None:
    connection = db.engine.raw_connection()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.cursor().execute("DELETE FROM run")
    connection.close()


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        queries.open_database(f"sqlite:///{tmp_path / 'none.db'}")
    (tmp_path / "noise.db").write_bytes(b"noise" * 100)
    with pytest.raises(ConfigError, match="cannot be read: file is not a database"):
        queries.open_database(f"sqlite:///{tmp_path / 'noise.db'}")
    (tmp_path / "empty.db").touch()
    with pytest.raises(ConfigError, match="not a telemetry database"):
        queries.open_database(f"sqlite:///{tmp_path / 'empty.db'}")


def test_the_summary_matches_the_run(history: tuple[str, SyntheticRun]) -> None:
    url, made = history
    summary = summarise(url)
    tokens = made.decode_tokens + made.prefill_tokens
    assert summary["hit_rate"] == pytest.approx(
        made.num_hits / (made.num_hits + made.num_cpu + made.num_fetched), abs=1e-12
    )
    assert summary["uploads_per_token"] == pytest.approx(made.num_uploads / tokens)
    assert summary["h2d_bytes"] == made.num_uploads * made.info.expert_bytes
    assert summary["evictions"] == made.num_evictions
    assert sum(summary["uploads_by_reason"].values()) == made.num_uploads
    assert summary["emulated"] is True
    assert summary["clock"] == "virtual"
    assert summary["dropped_events"] == {}
    assert summary["decode_tokens_per_s"] > summary["decode_tokens_per_wall_s"] > 0
    text = format_summary(summary)
    assert "(emulated)" in text
    assert f"{summary['hit_rate']:.1%}" in text


def test_real_runs_are_not_called_emulated(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path / 't.db'}", ManualClock()
    sink = open_sink(url, now=clock)
    sink.begin_run(run_info("none"))
    sink.close()
    summary = summarise(url)
    assert summary["emulated"] is False
    assert summary["hit_rate"] is None
    assert "emulated" not in format_summary(summary)


def test_the_command_prints_json_or_lines(
    history: tuple[str, SyntheticRun],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import argparse

    url, made = history
    monkeypatch.setenv("TWOFOLD_TELEMETRY_URL", url)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args(["summary", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["uploads"] == made.num_uploads
    assert cli.run(parser.parse_args(["summary", "--run", "1"])) == 0
    assert "hit rate" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no run 9"):
        cli.run(parser.parse_args(["summary", "--run", "9"]))
    monkeypatch.delenv("TWOFOLD_TELEMETRY_URL")
    monkeypatch.chdir(tmp_path)  # where no twofold.db of a `make run` lies
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(ConfigError, match="--telemetry-url"):
        cli.run(parser.parse_args(["summary"]))


def test_events_count_for_the_second_of_their_step_however_late_they_come(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path / 't.db'}", ManualClock(1_700_000_010.0)
    sink = open_sink(url, now=clock)
    sink.begin_run(run_info())
    rows = np.zeros(3, TOKEN_LAYER_DTYPE)
    rows["step"], rows["num_routed"], rows["num_hits"] = [0, 1, 2], 4, 4
    for step in (0, 1):
        sink.step(StepRecord(step, 1_700_000_003.0 + step, 0, 1, 1, 0, 100.0, 100.0))
    sink.native_events("token_layer", rows)  # step 2 was never reported
    sink.close()
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    seconds = [1_700_000_003, 1_700_000_004, 1_700_000_010]
    for second in seconds:
        assert int(table_queries.placement_grid(db, run, queries.Window(second, second + 1)).total.sum()) == 4
