"""A window between two moments: chosen in the sidebar, by the address, or with the brush on a chart."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import streamlit
from twofold.telemetry import queries

from dashboard import controls, formats
from tests.dashboard.app_pages import answers, link, metrics, show, texts, write_database
from tests.telemetry import table_queries

BEGIN_S, END_S = 1_700_000_002, 1_700_000_005
WINDOW = f"{BEGIN_S}-{END_S}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows") / "t.db"
    write_database(path, "cuda:0")
    return path


def one(path: Path, query: str) -> tuple[float, ...]:
    with sqlite3.connect(path) as connection:
        (row,) = connection.execute(query, (BEGIN_S, END_S)).fetchall()
    return tuple(row)


def test_figures_cover_exactly_the_chosen_stretch(monkeypatch: pytest.MonkeyPatch, ended: Path) -> None:
    decoded, prompts = one(
        ended,
        "SELECT sum(num_decode_tokens), sum(num_prefill_tokens) FROM step WHERE started_s >= ? AND started_s < ?",
    )
    app = show(monkeypatch, ended, window=WINDOW)
    assert f"{decoded:,} decode tokens and {prompts:,} prompt tokens in 3 s" in texts(app)
    hits, routed = one(
        ended,
        "SELECT sum(num_hits), sum(num_hits + num_cpu + num_fetched) FROM layer_second "
        "WHERE at_s >= ? AND at_s < ?",
    )
    app = show(monkeypatch, ended, "placement", window=WINDOW)
    assert (
        f"**{routed:,} uses of experts** from {formats.moment(BEGIN_S)} to {formats.moment(END_S)}"
        in texts(app)
    )
    assert metrics(app)["On GPU, hit"] == f"{hits / routed:.1%}"
    assert link(app, "window") == WINDOW
    db, run, _ = answers(ended)
    span = queries.Window(BEGIN_S, END_S)
    np.testing.assert_array_equal(
        queries.placements_between(db, run, span).uses, table_queries.placement_grid(db, run, span).uses
    )


def test_moments_are_typed_and_wrong_ones_are_reported(monkeypatch: pytest.MonkeyPatch, ended: Path) -> None:
    app = show(monkeypatch, ended, window=WINDOW)
    begin, end = app.sidebar.text_input
    assert (begin.label, end.label) == ("From", "To")
    assert begin.value == datetime.fromtimestamp(BEGIN_S).isoformat(" ")
    app = begin.set_value(datetime.fromtimestamp(BEGIN_S + 1).isoformat(" ")).run()
    assert link(app, "window") == f"{BEGIN_S + 1}-{END_S}"
    app = app.sidebar.text_input[0].set_value("tomorrow").run()
    assert "Not a moment. Expected one such as" in texts(app)
    assert link(app, "window") == f"{BEGIN_S + 1}-{END_S}"
    app = app.sidebar.text_input[0].set_value(datetime.fromtimestamp(END_S).isoformat(" ")).run()
    assert "The window ends before it begins." in texts(app)
    app = app.selectbox(key="window").set_value("all").run()
    assert link(app, "window") == "all"
    assert not app.sidebar.text_input


def test_the_brush_rounds_to_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [datetime.fromtimestamp(at_s).isoformat(" ") for at_s in (BEGIN_S + 2.75, BEGIN_S + 0.25)]
    state: dict[str, object] = {"speed": {"selection": {"box": [{"x": drawn}]}}}
    monkeypatch.setattr(streamlit, "session_state", state)
    controls.brush("speed")
    assert state["between"] == queries.Window(BEGIN_S, BEGIN_S + 3)
    assert controls.window_name() == f"{BEGIN_S}-{BEGIN_S + 3}"
    assert (controls.was_brushed(), controls.was_brushed()) == (True, False)
    state["speed"] = {"selection": {"box": []}}
    controls.brush("speed")
    assert not controls.was_brushed(), "a selection that was taken back changes nothing"
