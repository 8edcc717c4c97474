"""Charts are built without Plotly's checks: here Plotly checks what every page draws, and where plots lie."""

from __future__ import annotations

import json
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.subplots import make_subplots

from dashboard import parts
from dashboard.figures.chart import Chart
from tests.dashboard.app_pages import PAGES, show, write_database

WITHOUT_CHARTS = {"lab", "fleet", "slow_steps", "training"}
"""Pages that draw none for a run of one server."""
"""Pages that draw only after a button was pressed."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("charts") / "t.db"
    for accelerator in ("cuda:0", "none"):
        write_database(path, accelerator)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_plotly_accepts_what_a_page_draws(monkeypatch: pytest.MonkeyPatch, database: Path, page: str) -> None:
    drawn = [
        json.loads(chart.proto.spec)
        for run in ("1", "2")
        for chart in show(monkeypatch, database, page, run=run).get("plotly_chart")
    ]
    assert drawn or page in WITHOUT_CHARTS
    for figure in drawn:
        go.Figure(figure)  # ValueError names what Plotly does not know
        assert figure["data"]
        titles = [axis.get("title", {}) for name, axis in figure["layout"].items() if "axis" in name]
        assert all(isinstance(title, dict) for title in titles), (
            "the browser ignores a title that is a string"
        )


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_lie_where_plotly_puts_them(rows: int) -> None:
    chart, expected = Chart(rows=rows, spacing=0.04), make_subplots(rows=rows, vertical_spacing=0.04)
    for row in range(1, rows + 1):
        chart.add_scatter(y=[row], plot=row)
        expected.add_scatter(y=[row], row=row, col=1)
    _assert_equal(chart, expected)


def test_columns_lie_where_plotly_puts_them() -> None:
    expected = make_subplots(cols=2, column_widths=[0.8, 0.2], horizontal_spacing=0.02)
    chart = Chart(widths=(0.8, 0.2), spacing=0.02)
    for plot in (1, 2):
        chart.add_bar(y=[plot], plot=plot)
        expected.add_bar(y=[plot], row=1, col=plot)
    _assert_equal(chart, expected)


def _assert_equal(chart: Chart, expected: go.Figure) -> None:
    found = chart.built()
    for ours, theirs in zip(found.data, expected.data, strict=True):
        assert (ours.xaxis or "x", ours.yaxis or "y") == (theirs.xaxis, theirs.yaxis)
    for axis in expected.layout:
        if axis.startswith(("xaxis", "yaxis")):
            assert tuple(found.layout[axis].domain) == pytest.approx(expected.layout[axis].domain), axis
            assert found.layout[axis].anchor == expected.layout[axis].anchor


def test_what_is_set_later_is_added_to_what_was_set() -> None:
    chart = Chart()
    chart.add_scatter(y=[1], line={"width": 2})
    chart.update_traces(line={"dash": "dot"})
    chart.update_layout(margin={"l": 1, "r": 2})
    chart.update_layout(margin={"l": 3})
    chart.update_xaxes(title="ms", range=None)
    figure = chart.built()
    assert figure.data[0].line.to_plotly_json() == {"width": 2, "dash": "dot"}
    assert figure.layout.margin.to_plotly_json() == {"l": 3, "r": 2}
    assert figure.layout.xaxis.title.text == "ms"
    assert not chart.has_range()


def test_a_table_is_saved_as_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, str] = {}
    monkeypatch.setattr(parts.st, "html", lambda markup: None)
    monkeypatch.setattr(
        parts.st, "download_button", lambda label, data, name, kind, **more: saved.update({name: data})
    )
    parts.table(["figure", ""], [["a, b", "<1 & 2>"], ["", "3"]], name="Figures")
    assert saved == {"Figures.csv": 'figure,\r\n"a, b",<1 & 2>\r\n,3\r\n'}
