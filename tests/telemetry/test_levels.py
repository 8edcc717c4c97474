"""`--telemetry step|layer|expert`: what each level records, and that the others' data says which level it needs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.telemetry import queries
from twofold.telemetry.sink import LEVELS, TeeSink, TelemetryLevel, TelemetrySink
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, synthetic_history
from tests.tiny_models.writing import TinyModel, write_tiny_model

BLOCKS = ("token_layer_block", "upload_block", "cache_event_block")


def counts_of(path: Path) -> dict[str, int]:
    with sqlite3.connect(path) as database:
        tables = ("step", "request", "layer_second", *BLOCKS)
        return {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_records_what_it_documents(tmp_path: Path, level: TelemetryLevel) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    clock = ManualClock()
    sink = open_sink(url, level=level, now=clock)
    pushed = synthetic_history(sink, clock, seconds=4)
    sink.close()
    stats = sink.stats()
    assert stats is not None
    assert (stats.level, stats.num_dropped) == (level, 0), "what a level leaves out is not lost"
    counts = counts_of(tmp_path / "t.db")
    assert counts["step"] == pushed.step
    assert counts["request"] == pushed.next_number
    assert (counts["layer_second"] > 0) == (level != "step")
    assert all((counts[name] > 0) == (level == "expert") for name in BLOCKS)
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    assert queries.level_of(run) == level
    expected = 0 if level == "step" else pushed.num_hits
    assert queries.placement_totals(db, run).num_hits == expected


def test_missing_data_of_a_finer_level_names_the_level_to_record(tmp_path: Path) -> None:
    printed = {}
    for level in LEVELS:
        sink = open_sink(f"sqlite:///{tmp_path / level}.db", level=level)
        synthetic_history(sink, ManualClock(), seconds=1)
        sink.close()
        run = queries.runs(queries.open_database(f"sqlite:///{tmp_path / level}.db"))[0]
        printed[level] = {needed: queries.needs_level(run, needed) for needed in LEVELS}
    for recorded, by_needed in printed.items():
        for needed, sentence in by_needed.items():
            if LEVELS.index(recorded) >= LEVELS.index(needed):
                assert sentence is None
            else:
                assert sentence is not None
                assert f"--telemetry {recorded}." in sentence
                assert f"--telemetry {needed} " in sentence


def test_native_code_reports_no_events_that_no_sink_takes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TinyModel())
    for level, takes in (("step", False), ("layer", True)):
        sink = open_sink(f"sqlite:///{tmp_path / level}.db", level=level)
        engine = Engine.load(EngineConfig(model=str(tmp_path / "m"), accelerator="none"), telemetry=sink)
        try:
            engine.generate((5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True))
            assert engine.runner.moe.executor.events_enabled is takes
            assert engine.stats().placement.cpu_misses > 0, "counts are kept at every level"
        finally:
            engine.close()
            sink.close()
        assert counts_of(tmp_path / f"{level}.db")["step"] == 3
    assert TeeSink(sink, TelemetrySink()).takes_events
