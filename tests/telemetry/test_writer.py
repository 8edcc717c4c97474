"""The writer: nothing is lost silently, nothing blocks, nothing that can be wrong passes unnoticed at start."""

from __future__ import annotations

import dataclasses
import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.api.types import EmulatedParts, StepParts, StepRecord
from twofold.telemetry import queries
from twofold.telemetry.sink import EVENT_DTYPES, UPLOAD_DTYPE, TelemetrySink
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, synthetic_history
from tests.e2e.waiting import killed_at_end, wait_until
from tests.telemetry.records import open_writer, scalar, step_record, token_layers, url_of


def test_the_path_of_a_model_may_hold_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(dataclasses.replace(run_info(), model="/models/ta\udcffles"))
    sink.close()
    assert scalar(path, "SELECT model FROM run") == "/models/ta\ufffdles"


def test_every_event_of_a_run_is_there_after_close(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", ManualClock()
    sink = open_writer(path, now=clock)
    run = synthetic_history(sink, clock, seconds=6)
    sink.close()
    assert scalar(path, "SELECT count(*) FROM token_layer") == run.num_rows
    assert scalar(path, "SELECT count(*) FROM step") == run.step
    assert scalar(path, "SELECT count(*) FROM upload") == run.num_uploads
    assert scalar(path, "SELECT sum(size_bytes) FROM upload") == run.num_uploads * run.info.expert_bytes
    assert scalar(path, "SELECT count(*) FROM cache_event WHERE kind = 1") == run.num_evictions
    assert scalar(path, "SELECT count(*) FROM request WHERE finish_reason = 'stop'") == run.next_number
    assert scalar(path, "SELECT count(*) FROM dropped") == 0
    assert scalar(path, "SELECT finished_s FROM run") == clock.now_s
    assert sink.stats().num_dropped == 0


def test_an_overfull_queue_drops_and_counts_events(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path, max_queued_rows=1000)
    sink.begin_run(run_info())
    sink.native_events("token_layer", token_layers(5000))
    sink.close()
    assert scalar(path, "SELECT count(*) FROM token_layer") == 1000
    dropped = queries.open_database(url_of(path))
    assert queries.dropped(dropped, queries.runs(dropped)[0]) == [
        queries.Dropped("token_layer", "queue", 4000)
    ]
    assert sink.stats().num_dropped == 4000


class HeldClock:
    """A clock that blocks the thread of the writer until it is released: rows taken for a write cannot be shed."""

    def __init__(self) -> None:
        self.holds, self.is_released = threading.Event(), threading.Event()

    def __call__(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.holds.set()
            assert self.is_released.wait(60)
        return time.time()


def test_cache_events_make_room_for_other_rows(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", HeldClock()
    sink = open_writer(path, max_queued_rows=1000, now=clock)
    sink.begin_run(run_info())
    assert clock.holds.wait(60)
    for _ in range(4):
        sink.native_events("cache_event", np.zeros(250, EVENT_DTYPES["cache_event"]))
    sink.native_events("token_layer", token_layers(400))
    sink.native_events("cache_event", np.zeros(150, EVENT_DTYPES["cache_event"]))
    clock.is_released.set()
    sink.close()
    assert scalar(path, "SELECT count(*) FROM token_layer") == 400
    assert scalar(path, "SELECT count(*) FROM cache_event") == 600
    dropped = queries.open_database(url_of(path))
    (lost,) = queries.dropped(dropped, queries.runs(dropped)[0])
    assert lost == queries.Dropped("cache_event", "queue", 550)


def test_every_field_of_a_step_is_the_column_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    parts = StepParts(*(0.5 + number for number in range(len(StepParts._fields))))
    record = StepRecord(1, 2.0, 3, 4, 5, 6, 7.0, 8.0, parts=parts)
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.step(record)
    sink.close()
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    stored = dict(connection.execute("SELECT * FROM step").fetchone())
    connection.close()
    expected = (
        record._asdict() | parts._asdict() | {f"emulated_{name}": None for name in EmulatedParts._fields}
    )
    assert stored == {name: expected[name] for name in expected.keys() - {"parts", "emulated"}} | {
        "run_id": 1
    }


def test_native_events_never_crowd_out_steps(tmp_path: Path) -> None:
    sink = open_writer(tmp_path / "t.db", max_queued_rows=1000)
    sink.begin_run(run_info())
    sink.native_events("token_layer", token_layers(1000))
    for step in range(50):
        sink.step(step_record(step))
    sink.close()
    assert scalar(tmp_path / "t.db", "SELECT count(*) FROM step") == 50


def test_drops_of_native_rings_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.dropped("upload", 7)
    sink.dropped("upload", 0)
    sink.dropped("upload", 5)
    sink.close()
    db = queries.open_database(url_of(path))
    assert queries.dropped(db, queries.runs(db)[0]) == [queries.Dropped("upload", "ring", 12)]


def test_events_without_a_run_are_counted_not_stored(tmp_path: Path) -> None:
    sink = open_writer(tmp_path / "t.db")
    sink.step(step_record(0))
    sink.close()
    assert sink.stats().num_dropped == 1
    assert scalar(tmp_path / "t.db", "SELECT count(*) FROM step") == 0


def test_after_close_nothing_is_taken_and_closing_again_is_harmless(tmp_path: Path) -> None:
    sink = open_writer(tmp_path / "t.db")
    sink.begin_run(run_info())
    sink.close()
    sink.step(step_record(0))
    sink.close()
    assert sink.stats().num_dropped == 1


def test_the_caller_may_reuse_its_array(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())
    rows = token_layers(10, step=1)
    sink.native_events("token_layer", rows)
    rows["step"] = 99
    sink.close()
    assert scalar(path, "SELECT max(step) FROM token_layer") == 1


def test_padded_structs_with_fields_in_another_order_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    fields = [(name, UPLOAD_DTYPE.fields[name][0]) for name in reversed(UPLOAD_DTYPE.names)]
    rows = np.zeros(1, np.dtype(fields, align=True))
    rows["expert"], rows["size_bytes"] = 17, 12_345
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.native_events("upload", rows)
    sink.close()
    assert scalar(path, "SELECT size_bytes FROM upload WHERE expert = 17") == 12_345


def test_arrays_of_the_wrong_shape_are_our_bug_and_raise(tmp_path: Path) -> None:
    sink = open_writer(tmp_path / "t.db")
    with pytest.raises(ValueError, match="lack the fields"):
        sink.native_events("upload", token_layers(1))
    with pytest.raises(ValueError, match="unknown event kind"):
        sink.native_events("weather", token_layers(1))
    sink.close()


def test_two_runs_of_one_process_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    for model in ("first", "second"):
        sink.begin_run(run_info(model=model))
        sink.step(step_record(0))
    sink.close()
    assert (
        scalar(path, "SELECT group_concat(model || step) FROM run JOIN step USING (run_id)")
        == "first0,second0"
    )


def test_a_database_error_costs_events_but_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.step(step_record(0))
    wait_until(lambda: sink.stats().num_written == 1)
    other = sqlite3.connect(path, timeout=10)
    other.execute("ALTER TABLE step RENAME TO elsewhere")
    with caplog.at_level(logging.WARNING, "twofold.telemetry"):
        for step in (1, 2):
            sink.step(step_record(step))
            wait_until(lambda: sink.stats().num_dropped == step)  # noqa: B023
        assert "step" in (sink.stats().last_error or "")
        other.execute("ALTER TABLE elsewhere RENAME TO step")
        other.close()
        sink.step(step_record(3))
        sink.close()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert sink.stats().last_error is None
    assert scalar(path, "SELECT group_concat(step) FROM step") == "0,3"
    assert scalar(path, "SELECT sum(num_events) FROM dropped WHERE kind = 'step' AND place = 'database'") == 2


def test_readers_get_complete_transactions_during_writes(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())

    def produce() -> None:
        for step in range(200):
            sink.native_events("token_layer", token_layers(60, step=step))
        sink.close()

    producer = threading.Thread(target=produce)
    producer.start()
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    seen = []
    finished = False
    while not finished:
        finished = not producer.is_alive()
        rows, summed = reader.execute(
            "SELECT (SELECT count(*) FROM token_layer), (SELECT coalesce(sum(num_rows), 0) FROM layer_second)"
        ).fetchone()
        assert rows == summed
        seen.append(rows)
    reader.close()
    assert seen == sorted(seen)
    assert seen[-1] == 200 * 60


def test_a_killed_process_leaves_a_sound_database(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    program = textwrap.dedent(
        """
        import sys
        from twofold.telemetry.writer import open_sink
        from tests.dashboard.synthetic_run import run_info
        from tests.telemetry.records import token_layers
        sink = open_sink(sys.argv[1])
        sink.begin_run(run_info())
        step = 0
        while True:
            sink.native_events("token_layer", token_layers(6, step=step))
            step += 1
            if sink.stats().num_written >= 600:
                print(sink.stats().num_written, flush=True)
                break
        while True:
            sink.native_events("token_layer", token_layers(6, step=step))
        """
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", program, url_of(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with killed_at_end(child):
        assert child.stdout is not None
        num_written = int(child.stdout.readline())
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.close()
    assert scalar(path, "PRAGMA integrity_check") == "ok"
    rows = scalar(path, "SELECT count(*) FROM token_layer")
    assert isinstance(rows, int)
    assert rows >= num_written
    assert rows == scalar(path, "SELECT sum(num_rows) FROM layer_second")
    db = queries.open_database(url_of(path))
    second, first = queries.runs(db)
    assert first.finished_s is None
    assert second.finished_s is not None
    assert not first.is_live(first.last_seen_s + 60)


def test_only_one_process_writes_a_file(tmp_path: Path) -> None:
    sink = open_writer(tmp_path / "t.db")
    with pytest.raises(ConfigError, match="being written by another process"):
        open_sink(url_of(tmp_path / "t.db"))
    sink.close()
    open_writer(tmp_path / "t.db").close()


@pytest.mark.parametrize("url", [None, ""])
def test_no_url_means_no_telemetry(url: str | None) -> None:
    sink = open_sink(url)
    assert type(sink) is TelemetrySink
    SyntheticRun(sink, ManualClock()).run_steps(1, 0.1)
    sink.close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("telemetry.db", "is not a database URL; expected sqlite:///"),
        ("mysql://host/db", "not SQLite or PostgreSQL; expected sqlite:///"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////proc/twofold.db", "/proc/twofold.db cannot be written"),
        ("sqlite:////nonexistent/here/t.db", "mkdir -p /nonexistent/here"),
        ("sqlite:////tmp", "/tmp is a directory"),
    ],
)
def test_bad_urls_are_refused_with_the_remedy(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        open_sink(url)
    assert "--telemetry-url" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "locked"
    directory.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="is read-only"):
        open_sink(url_of(directory / "t.db"))


def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    open_writer(path).close()
    path.chmod(0o400)
    with pytest.raises(ConfigError, match="is read-only"):
        open_sink(url_of(path))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    noise, foreign, other = tmp_path / "noise.db", tmp_path / "foreign.db", tmp_path / "other.db"
    noise.write_bytes(b"not a database at all, but longer than a header of one hundred bytes " * 3)
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    open_writer(other).close()
    connection = sqlite3.connect(other)
    connection.execute("UPDATE meta SET value = '999'")
    connection.commit()
    connection.close()
    before = noise.read_bytes()
    for path, complaint in [
        (noise, "not a database"),
        (foreign, "is not a telemetry database"),
        (other, "schema version 999, and this Twofold knows versions up to"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            open_sink(url_of(path))
    assert noise.read_bytes() == before
    assert scalar(foreign, "SELECT count(*) FROM sqlite_master") == 1
