"""Perfetto export: valid trace events, every recorded row in its place, clocks kept apart."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry import queries
from twofold.telemetry.exports import export_window, trace, write_perfetto
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history
from tests.telemetry.trace_event_schema import TRACE

START_S = 1_700_000_000.0


def recorded(path: Path, accelerator: str = "emulated:rtx4090-pcie4") -> queries.Database:
    """A database with one run of 8 s."""
    url = f"sqlite:///{path / 't.db'}"
    clock = ManualClock(START_S)
    sink = open_sink(url, now=clock)
    synthetic_history(sink, clock, seconds=8, info=run_info(accelerator))
    sink.close()
    return queries.open_database(url)


def exported(db: queries.Database, path: Path, **choice: Any) -> dict[str, Any]:
    window = export_window(db, queries.runs(db)[0], **choice)
    count = write_perfetto(db, window, path / "trace.json")
    written = json.loads((path / "trace.json").read_text(encoding="utf-8"))
    assert len(written["traceEvents"]) == count
    return written


def slices(written: dict[str, Any], process: int, name: str) -> list[dict[str, Any]]:
    """Slices of the track whose name begins with `name`."""
    tracks = {
        (each["pid"], each["tid"])
        for each in written["traceEvents"]
        if each["name"] == "thread_name" and each["pid"] == process and each["args"]["name"].startswith(name)
    }
    assert len(tracks) == 1, name
    (track,) = tracks
    found = [each for each in written["traceEvents"] if each["ph"] in "Xi"]
    return [each for each in found if (each["pid"], each["tid"]) == track]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[queries.Database, dict[str, Any]]:
    path = tmp_path_factory.mktemp("trace")
    db = recorded(path)
    return db, exported(db, path)


def test_it_is_a_trace_of_the_published_format(emulated: tuple[queries.Database, dict[str, Any]]) -> None:
    _, written = emulated
    jsonschema.Draft202012Validator(TRACE).validate(written)


def test_the_schema_refuses_events_that_viewers_cannot_read() -> None:
    validator = jsonschema.Draft202012Validator(TRACE)
    good = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
    assert validator.is_valid({"traceEvents": [good]})
    for bad in ({"dur": -1}, {"ts": "0"}, {"ph": "?"}, {"name": ""}, {"pid": None}):
        assert not validator.is_valid({"traceEvents": [{**good, **bad}]}), bad


def test_every_row_is_there_and_no_slices_overlap(
    emulated: tuple[queries.Database, dict[str, Any]],
) -> None:
    db, written = emulated
    counts = {}
    with sqlite3.connect(db.path) as connection:
        for table in ("step", "upload", "cache_event", "request"):
            counts[table] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        layers = connection.execute(
            "SELECT count(*) FROM (SELECT DISTINCT step, layer FROM token_layer)"
        ).fetchone()[0]
    assert len(slices(written, trace.WALL, "steps")) == counts["step"] > 60
    assert len(slices(written, trace.RUN_CLOCK, "steps")) == counts["step"]
    assert len(slices(written, trace.RUN_CLOCK, "MoE layers")) == layers > 300
    assert len(slices(written, trace.RUN_CLOCK, "PCIe lane 0")) == counts["upload"] > 100
    assert len(slices(written, trace.RUN_CLOCK, "expert cache")) == counts["cache_event"]
    spans = [each for each in written["traceEvents"] if each["ph"] == "b"]
    assert sum(each["name"].startswith("request ") for each in spans) == counts["request"] == 4
    tracks = defaultdict(list)
    for each in written["traceEvents"]:
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for ranges in tracks.values():
        ranges.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(ranges))


def test_a_step_and_an_upload_are_where_the_database_has_them(
    emulated: tuple[queries.Database, dict[str, Any]],
) -> None:
    db, written = emulated
    with sqlite3.connect(db.path) as connection:
        step_us, wall_us, begin_us, origin_us = connection.execute(
            "SELECT step_us, wall_us, begin_us, (SELECT begin_us FROM step WHERE step = 0) FROM step "
            "WHERE step = 30"
        ).fetchone()
        layer, expert, upload_us, end_us = connection.execute(
            "SELECT layer, expert, begin_us, end_us FROM upload WHERE step = 30 ORDER BY begin_us"
        ).fetchone()
    shown = next(s for s in slices(written, trace.RUN_CLOCK, "steps") if s["args"]["step"] == 30)
    assert (shown["ts"], shown["dur"]) == pytest.approx((begin_us - origin_us, step_us), abs=2e-3)
    wall = next(s for s in slices(written, trace.WALL, "steps") if s["args"]["step"] == 30)
    assert wall["dur"] == pytest.approx(wall_us, abs=2e-3)
    copied = next(s for s in slices(written, trace.RUN_CLOCK, "PCIe lane 0") if s["args"]["step"] == 30)
    assert copied["name"] == f"layer {layer} expert {expert}"
    assert (copied["ts"], copied["dur"]) == pytest.approx(
        (upload_us - origin_us, end_us - upload_us), abs=2e-3
    )


def test_an_emulated_clock_is_named_in_every_track_and_in_the_facts(
    emulated: tuple[queries.Database, dict[str, Any]], tmp_path: Path
) -> None:
    _, written = emulated
    names = {
        (each["pid"], each["name"]): each["args"]["name"]
        for each in written["traceEvents"]
        if each["name"] == "process_name"
    }
    assert "emulated" in names[trace.RUN_CLOCK, "process_name"]
    assert "emulated" not in names[trace.WALL, "process_name"]
    tracks = [each for each in written["traceEvents"] if each["name"] == "thread_name"]
    assert all(("(emulated)" in each["args"]["name"]) == (each["pid"] == trace.RUN_CLOCK) for each in tracks)
    assert written["otherData"]["emulated"] is True

    real = exported(recorded(tmp_path, "cuda:0"), tmp_path)
    assert real["otherData"]["emulated"] is False
    assert "emulated" not in json.dumps(real["traceEvents"])


def test_a_range_has_its_steps_alone(
    emulated: tuple[queries.Database, dict[str, Any]], tmp_path: Path
) -> None:
    db, _ = emulated
    begin_s = queries.runs(db)[0].started_s
    with sqlite3.connect(db.path) as connection:
        inside = connection.execute(
            "SELECT min(step), max(step) FROM step WHERE started_s >= ? AND started_s < ?",
            (begin_s + 1.995, begin_s + 3.5),
        ).fetchone()
        last = connection.execute("SELECT max(started_s) FROM step").fetchone()[0]
        of_end = connection.execute(
            "SELECT min(step) FROM step WHERE started_s >= ?", (last - 1.005,)
        ).fetchone()
    some = exported(db, tmp_path, begin="1.995", end="3.5")  # between two steps
    steps = [each["args"]["step"] for each in slices(some, trace.WALL, "steps")]
    assert (min(steps), max(steps)) == inside
    assert len(steps) == inside[1] - inside[0] + 1
    latest = [s["args"]["step"] for s in slices(exported(db, tmp_path, last_s=1.005), trace.WALL, "steps")]
    assert min(latest) == of_end[0]


@pytest.mark.parametrize("choice", [{"begin": "2.05", "end": "3"}, {"begin": "2.0"}, {"last_s": 1.55}])
def test_a_range_begins_at_the_begin_of_a_step(tmp_path: Path, choice: dict[str, Any]) -> None:
    """The step that runs at the begin is there, whole; its scheduling comes before the database's `started_s`."""
    db = recorded(tmp_path)
    with sqlite3.connect(db.path) as connection:
        connection.execute("UPDATE step SET schedule_us = 20000, experts_cpu_us = experts_cpu_us - 20000")
    written = exported(db, tmp_path, **choice)
    first = min(slices(written, trace.WALL, "steps"), key=lambda each: each["ts"])
    begin_s = written["otherData"]["begin_unix_s"]
    with sqlite3.connect(db.path) as connection:
        started_s, wall_us = connection.execute(
            "SELECT started_s, wall_us FROM step WHERE step = ?", (first["args"]["step"],)
        ).fetchone()
        (last_s,) = connection.execute("SELECT max(started_s) FROM step").fetchone()
    assert begin_s == pytest.approx(started_s - 0.02, abs=1e-5)
    assert first["ts"] == pytest.approx(0, abs=1)
    assert first["dur"] == pytest.approx(wall_us, abs=1)
    asked_s = START_S + float(choice["begin"]) if "begin" in choice else last_s - choice["last_s"]
    assert begin_s <= asked_s < begin_s + wall_us * 1e-6
    assert min(each["ts"] for each in written["traceEvents"] if each["ph"] in "Xi") >= -1


@pytest.mark.parametrize(
    ("choice", "printed"),
    [
        ({"begin": "yesterday"}, "ISO 8601"),
        ({"begin": "5", "end": "5"}, "not after"),
        ({"begin": "-1"}, "0 or more"),
        ({"last_s": 0.0}, "above 0"),
        ({"last_s": 5.0, "begin": "1"}, "together"),
        ({"begin": "3600"}, "no step and no request between 3600.0 and .* it lasted 9.1 s"),
    ],
)
def test_a_bad_range_is_refused(
    emulated: tuple[queries.Database, dict[str, Any]], choice: dict[str, Any], printed: str
) -> None:
    db, _ = emulated
    with pytest.raises(ConfigError, match=printed):
        export_window(db, queries.runs(db)[0], **choice)


def test_an_iso_time_is_the_moment_it_names(emulated: tuple[queries.Database, dict[str, Any]]) -> None:
    db, _ = emulated
    window = export_window(
        db, queries.runs(db)[0], begin="2023-11-14T22:13:21.995Z", end="2023-11-14T23:13:23+01:00"
    )
    assert (window.begin_s, window.end_s) == (START_S + 1.995, START_S + 3)


def test_a_failed_export_leaves_the_previous_file(
    emulated: tuple[queries.Database, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db, _ = emulated
    target = tmp_path / "trace.json"
    target.write_text("previous", encoding="utf-8")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("twofold.telemetry.exports.trace.upload_events", fail)
    with pytest.raises(OSError, match="disk full"):
        write_perfetto(db, export_window(db, queries.runs(db)[0]), target)
    assert target.read_text(encoding="utf-8") == "previous"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
