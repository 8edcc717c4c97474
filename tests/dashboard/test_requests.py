"""The Requests page: its table, what a request's client felt, and why a token was slow."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from dashboard import explanation, formats
from tests.dashboard.app_pages import answers, link, metrics, show, texts, write_database
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, _Running, run_info


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "t.db"
    write_database(path, "emulated:rtx4090-pcie4")
    return path


def test_a_request_is_explained_by_its_own_rows(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    db, run, _ = answers(emulated)
    newest = queries.requests(db, run)[0]
    app = show(monkeypatch, emulated, "requests")
    tokens = queries.request_tokens(db, run, newest.number, first_position=newest.prompt_tokens - 1)
    slowest = 1 + int(np.argmax(tokens.wall_us[1:]))
    text = texts(app)
    assert f"**Why the token at position {tokens.position[slowest]} took this long**" in text
    _, cpu, fetched = tokens.num_by_placement[slowest].sum(axis=0).tolist()
    assert f"**{cpu + fetched} of its " in text
    assert f"{cpu} ran on the CPU, {fetched} were fetched" in text
    for expert in tokens.experts[slowest].ravel().tolist():
        assert f"{expert} <small>" in text
    assert f"for all {tokens.batch_tokens[slowest]} tokens of its batch" in text
    other = int(tokens.position[-1])
    app = app.select_slider[0].set_value(other).run()
    assert f"**Why the token at position {other} took this long**" in texts(app)
    assert link(app, "token") == str(other)


def test_the_slowest_token_is_that_of_the_chosen_clock(
    monkeypatch: pytest.MonkeyPatch, emulated: Path
) -> None:
    db, run, _ = answers(emulated)
    newest = queries.requests(db, run)[0]
    tokens = queries.request_tokens(db, run, newest.number, first_position=newest.prompt_tokens - 1)
    app = show(monkeypatch, emulated, "requests", request=str(newest.number), token=str(tokens.position[-1]))
    app = app.button_group(key="clock").set_value(["Emulated clock"]).run()
    assert not app.exception
    assert f"**Why the token at position {tokens.position[-1]} took this long**" in texts(app), (
        "the link holds"
    )


def test_wall_times_precede_emulated_ones(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    with sqlite3.connect(emulated) as connection:
        ttft, itl, e2e, decode_s, tokens = connection.execute(
            "SELECT first_token_s - submitted_s, (finished_s - first_token_s) / (completion_tokens - 1), "
            "finished_s - submitted_s, decode_s, completion_tokens FROM request WHERE number = 1"
        ).fetchone()
    app = show(monkeypatch, emulated, "requests", request="1")
    shown = metrics(app)
    assert (shown["TTFT"], shown["TPOT"], shown["E2E"]) == tuple(map(formats.seconds, (ttft, itl, e2e)))
    assert f"{formats.seconds(decode_s / (tokens - 1))} emulated" in [metric.delta for metric in app.metric]
    assert "emulated" not in "".join(f"{label}{value}" for label, value in shown.items())


def test_the_address_names_the_request_and_the_token(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    app = show(monkeypatch, emulated, "requests", request="0", token="20")
    assert "**Request 0**" in texts(app)
    assert "**Why the token at position 20 took this long**" in texts(app)
    for wrong in ("99", "x"):
        app = show(monkeypatch, emulated, "requests", request=wrong)
        assert [f"Request {wrong} is not in this run" in warning.value for warning in app.warning] == [
            False,
            True,
        ]


def listed(app: AppTest) -> list[int]:
    return [int(number) for number in app.dataframe[0].value["number"]]


def test_every_request_can_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_sink(f"sqlite:///{path}", now=ManualClock())
    made = SyntheticRun(sink, ManualClock(), run_info("cuda:0"))
    for _ in range(450):
        made._record(_Running(made.next_number, 1_700_000_000.0, 5, 5), "stop")
        made.next_number += 1
    made._record(_Running(450, 1_700_000_000.0, 5, 5), "cancelled")
    sink.close()
    app = show(monkeypatch, path, "requests")
    seen = []
    for page in range(1, 6):
        app = app.number_input[0].set_value(page).run()
        seen += listed(app)
    assert seen == list(range(450, -1, -1))
    app = app.text_input[0].set_value("cmpl-0007").run()
    assert listed(app) == [7]
    app = app.text_input[0].set_value("7").run()
    assert 7 in listed(app)
    app = app.text_input[0].set_value("no_such%").run()
    assert "No requests match the filter" in texts(app)
    app = app.text_input[0].set_value("").run()
    app = app.selectbox(key="ended-1").set_value("cancelled").run()
    assert listed(app) == [450]


def test_requests_are_sorted_by_client_times(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    orders = {
        "ttft": "first_token_s - submitted_s",
        "tpot": "(finished_s - first_token_s) / (completion_tokens - 1)",
        "e2e": "finished_s - submitted_s",
        "prompt": "prompt_tokens",
        "answer": "completion_tokens",
        "gap": "longest_gap_s",
    }
    app = show(monkeypatch, emulated, "requests")
    for name, sql in orders.items():
        app = app.selectbox(key="sort-1").set_value(name).run()
        with sqlite3.connect(emulated) as connection:
            rows = connection.execute(
                f"SELECT number FROM request ORDER BY {sql} DESC, number DESC"
            ).fetchall()
        assert listed(app) == [number for (number,) in rows], name


def test_the_parts_of_a_request_follow_one_another() -> None:
    stamps = {"received_s": 10.0, "submitted_s": 10.0, "first_token_s": 10.5, "finished_s": 12.0}
    request = _request(**stamps)
    assert [(part.name, part.begin_s, part.duration_s) for part in queries.waterfall(request)] == [
        ("queue and prefill", 0.0, 0.5),
        ("decode", 0.5, 1.5),
    ]
    assert queries.times_at_client(request) == (0.5, 0.75, 2.0)
    assert queries.waterfall(_request(**{**stamps, "first_token_s": None, "finished_s": None})) == []


def _request(**stamps: float | None) -> queries.Request:
    return queries.Request(
        run_id=1,
        number=0,
        request_id="a",
        endpoint="/",
        prompt_tokens=4,
        completion_tokens=3,
        finish_reason="stop",
        sampling_json="{}",
        **stamps,  # type: ignore[arg-type]
    )


def test_a_recorded_answer_is_coloured_and_never_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=2)
    db, run, _ = answers(path)
    assert "`--telemetry-text` records it" in texts(show(monkeypatch, path, "requests", request="0"))
    pieces = ["Once", " upon", "<img src=x onerror=alert(1)>"]
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE request SET answer_json = ?", (json.dumps(pieces),))
    text = texts(show(monkeypatch, path, "requests", request="0"))
    request = queries.request(db, run, 0)
    assert request is not None
    tokens = queries.request_tokens(db, run, 0, first_position=request.prompt_tokens - 1)
    missed = tokens.num_by_placement.sum(axis=1)[:, [queries.Placement.CPU, queries.Placement.FETCHED]].sum(
        axis=1
    )
    for piece, misses in zip(("Once", " upon"), missed.tolist(), strict=False):
        assert f'title="{misses} misses">{piece}</span>' in text
    assert "&lt;img src=x" in text
    assert "<img" not in explanation.coloured_answer(request, tokens)
