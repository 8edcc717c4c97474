"""The Fleet page: replicas of one fleet, why each request went where, and a request found by its trace."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from twofold.api.request_record import RequestRecord
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from tests.dashboard.app_pages import metrics, show, texts
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info

TRACE = "0af7651916cd43dd8448eb211c80319c"
DECISIONS = {"one": ["load", "prefix", "prefix", "load"], "two": ["load", "retry"]}


def record(url: str) -> None:
    """Two replicas and a server of its own that ran at the same time, one after the other written."""
    for seed, replica in enumerate(("one", "two", "")):
        clock = ManualClock()
        sink = open_sink(url, now=clock)
        info = run_info("cuda:0", replica=replica, host=f"host-{replica}")
        run = SyntheticRun(sink, clock, info, seed=seed)
        for number, reason in enumerate(DECISIONS.get(replica, [])):
            sink.request(
                RequestRecord(
                    number=1000 + number,
                    request_id=f"{replica}-{number}",
                    endpoint="chat.completions",
                    submitted_s=clock(),
                    first_token_s=clock(),
                    finished_s=clock(),
                    prompt_tokens=100,
                    completion_tokens=1,
                    finish_reason="stop",
                    cached_tokens=80 if reason == "prefix" else 0,
                    trace_id=TRACE if (replica, number) == ("one", 2) else "",
                    routed_by=reason,
                )
            )
        run.submit(prompt_tokens=6, answer_tokens=20)
        while run.running:
            run.run_steps(1, 0.1)
        sink.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('fleet') / 't.db'}"
    record(found)
    return found


def test_a_fleet_has_its_replicas_and_no_other_run(url: str) -> None:
    db = queries.open_database(url)
    alone, two, one = queries.runs(db)
    for run in (one, two):
        replicas = queries.fleet(db, run, queries.window(run))
        assert [each.run.replica for each in replicas] == ["one", "two"]
    first, second = replicas
    assert {reason: each.num_requests for reason, each in first.decided.items() if reason} == {
        "load": 2,
        "prefix": 2,
    }
    assert first.hit_share == pytest.approx(160 / first.total.prompt_tokens)
    assert second.decided["retry"] == queries.Decided(1, 100, 0, 1)
    (only,) = queries.fleet(db, alone, queries.window(alone))
    assert only.run == alone
    elsewhen = replace(one, started_s=one.started_s - 9e6, finished_s=one.started_s - 8e6)
    assert queries.fleet(db, elsewhen, queries.window(one)) == []


def test_a_trace_finds_its_request_on_any_replica(url: str) -> None:
    db = queries.open_database(url)
    (found,) = queries.traced(db, f" {TRACE.upper()} ")
    assert (found.request_id, found.routed_by) == ("one-2", "prefix")
    one = queries.runs(db)[2]
    assert [each.number for each in queries.requests(db, one, search=TRACE)] == [found.number]


def test_the_page_shows_replicas_decisions_and_experts(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    app = show(monkeypatch, url, "fleet", run="2", window="all")
    shown = metrics(app)
    assert (shown["Replicas"], shown["Requests"], shown["Retried"]) == ("0 of 2 live", "8", "1")
    text = texts(app).replace(' class="tf-text"', "")
    assert (
        "<td>one</td><td>host-one</td><td>ended</td><td>–</td><td>5</td><td>2</td><td>2</td><td>0</td>"
        in text
    )
    assert "Hottest experts" in text
    assert "host-</td>" not in text
    app.text_input(key="trace").set_value(TRACE).run()
    assert "<td>one</td><td>1,002</td><td>prefix</td>" in texts(app).replace(' class="tf-text"', "")


REPLACED = {
    "first": (0.0, 100.0, 41, False),
    "survivor": (0.0, 300.0, 9, True),
    "replacement": (120.0, 300.0, 5, True),
    "of another day": (9000.0, 9100.0, 7, True),
}
"""Begin and end of each replica, its requests, and whether it shut down."""


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet of two whose first replica was killed and replaced; its last request was not finished."""
    path = tmp_path_factory.mktemp("replaced") / "t.db"
    for replica, (begin_s, end_s, count, ended) in REPLACED.items():
        clock = ManualClock(1.7e9 + begin_s)
        sink = open_sink(f"sqlite:///{path}", now=clock)
        sink.begin_run(run_info("cuda:0", replica=replica, host="here"))
        for number in range(count):
            at_s = clock() + 1 + number
            finished = ended or number < count - 1
            sink.request(
                RequestRecord(
                    number=number,
                    request_id=f"{replica}-{number}",
                    endpoint="chat.completions",
                    submitted_s=at_s,
                    received_s=at_s,
                    first_token_s=at_s,
                    finished_s=at_s + 1 if finished else None,
                    finish_reason="stop" if finished else None,
                    prompt_tokens=10,
                    completion_tokens=3,
                    routed_by="load",
                )
            )
        clock.now_s = 1.7e9 + end_s
        sink.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE run SET finished_s = NULL, last_seen_s = started_s + 100 WHERE run_id = 1")
    return path


def test_a_lost_replica_and_all_earlier_requests_stay_in_the_window(
    monkeypatch: pytest.MonkeyPatch, replaced: Path
) -> None:
    """The replacement is chosen, which met only the survivor; its own run begins after most requests."""
    app = show(monkeypatch, replaced, "fleet", run="3", window="all")
    shown, text = metrics(app), texts(app).replace(' class="tf-text"', "")
    assert (shown["Replicas"], shown["Lost"], shown["Requests"]) == ("0 of 3 live", "1", "55")
    assert "<td>first</td><td>here</td><td>interrupted</td><td>1 lost</td><td>41</td><td>41</td>" in text
    assert "retried" not in text, "a column only where it says something"
    # The last minute of the fleet: nothing of the lost replica.
    app = show(monkeypatch, replaced, "fleet", run="3", window="1m")
    assert metrics(app)["Replicas"] == "0 of 2 live"
    with sqlite3.connect(replaced) as connection:
        (end_s,) = connection.execute("SELECT max(finished_s) FROM run WHERE run_id < 4").fetchone()
        within = "SELECT count(*) FROM request WHERE run_id < 4 AND submitted_s >= ?"
        (count,) = connection.execute(within, (int(end_s) + 1 - 60,)).fetchone()
    assert metrics(app)["Requests"] == str(count)


def test_a_replica_lost_alone_belongs_to_its_replacement(replaced: Path) -> None:
    db = queries.open_database(f"sqlite:///{replaced}")
    later, *fleet = queries.runs(db)
    assert queries.fleet_runs(db, fleet[0]) == fleet[::-1]
    assert queries.fleet_runs(db, later) == [later]
    with sqlite3.connect(replaced) as connection:
        connection.execute("UPDATE run SET replica = '' WHERE run_id = 2")
        try:
            connection.commit()
            assert [run.run_id for run in queries.fleet_runs(db, fleet[0])] == [1, 3]
        finally:
            connection.execute("UPDATE run SET replica = 'survivor' WHERE run_id = 2")
