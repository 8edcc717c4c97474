"""The dashboard in a real browser: no error in the console, nothing cut off, no other host, figures as SQL has them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry.writer import open_sink

from dashboard import formats
from dashboard.pages import PAGES
from scripts.headless_chromium import (
    DevTools,
    browser,
    chromium,
    faults,
    open_page,
    photograph,
    wait_until_ready,
)
from tests.dashboard.app_pages import write_database
from tests.dashboard.served_dashboard import served
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, training_history
from tests.e2e.axe import serious_findings
from tests.e2e.waiting import wait_until

PROGRAM = chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium (Debian: apt-get install chromium)"),
]
UNNAMED = """
[...document.querySelectorAll('[data-testid=stPlotlyChart]')].filter(
  chart => !chart.hasAttribute('aria-label') && !chart.querySelector('[aria-label]')).length
"""
LOOKS = {"light": (1360, False), "dark": (1360, True), "phone": (390, False)}


@pytest.fixture(scope="module")
def tools() -> Iterator[DevTools]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("ended")
    for accelerator in ("none", "cuda:0", "emulated:rtx4090-pcie4"):
        write_database(folder / "t.db", accelerator)
    sink = open_sink(f"sqlite:///{folder / 't.db'}")
    training_history(sink)
    sink.close()
    with served(folder / "t.db", folder) as url:
        yield url, folder / "t.db"


def _address(url: str, name: str) -> str:
    return url if name == PAGES[0].name else f"{url}/{name}"


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", [page.name for page in PAGES])
def test_a_page_of_an_ended_run_is_whole(
    tools: DevTools, ended: tuple[str, Path], name: str, look: str
) -> None:
    width, dark = LOOKS[look]
    for run in (1, 4 if name == "training" else 3):
        address = f"{_address(ended[0], name)}?run={run}"
        open_page(tools, address, width=width, dark=dark)
        photograph(tools, address, width)
        assert faults(tools, address, width) == []
        assert tools.evaluate(UNNAMED) == 0, "charts without a description"
        assert serious_findings(tools) == []
    background = tools.evaluate(
        "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    )
    assert background == ("rgb(17, 21, 28)" if dark else "rgb(247, 248, 250)"), "the theme of config.toml"


def test_the_figures_in_the_browser_are_those_of_sql(tools: DevTools, ended: tuple[str, Path]) -> None:
    url, path = ended
    open_page(tools, f"{url}/?run=2")
    wait_until_ready(tools, url)
    shown = dict(
        tools.evaluate(
            "[...document.querySelectorAll('[data-testid=stMetric]')].map(metric => ["
            "metric.querySelector('[data-testid=stMetricLabel]').innerText.trim(), "
            "metric.querySelector('[data-testid=stMetricValue]').innerText.trim()])"
        )
    )
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT first_token_s - submitted_s FROM request WHERE run_id = 2 AND finish_reason = 'stop'"
        ).fetchall()
        ((hits, routed),) = connection.execute(
            "SELECT sum(num_hits), sum(num_hits + num_cpu + num_fetched) FROM layer_second WHERE run_id = 2"
        ).fetchall()
    assert shown["TTFT, p50"] == formats.seconds(float(np.percentile(np.array(rows), 50)))
    assert shown["Hit rate"] == f"{hits / routed:.1%}"
    assert shown["Answered / requests"] == f"{len(rows)} / {len(rows)}"


def test_the_first_pages_own_name_leads_to_it(tools: DevTools, ended: tuple[str, Path]) -> None:
    url, _ = ended
    open_page(tools, f"{url}/overview?run=2")
    wait_until_ready(tools, url, "Overview")
    assert "does not exist" not in tools.evaluate("document.body.innerText")
    assert tools.evaluate("location.pathname + location.search") == "/?run=2"
    assert tools.evaluate("document.querySelectorAll('[data-testid=stMetric]').length") > 4


def test_a_stretch_dragged_on_a_chart_becomes_the_window(tools: DevTools, ended: tuple[str, Path]) -> None:
    url, _ = ended
    open_page(tools, f"{url}/?run=2")
    wait_until_ready(tools, url)
    area = "document.querySelector('[data-testid=stPlotlyChart] .nsewdrag')"
    tools.evaluate(f"{area}.scrollIntoView({{block: 'center'}})")
    left, width, y = tools.evaluate(
        f"(() => {{ const r = {area}.getBoundingClientRect(); return [r.left, r.width, r.top + r.height / 2] }})()"
    )
    for kind, share in (
        ("mousePressed", 0.3),
        ("mouseMoved", 0.5),
        ("mouseMoved", 0.7),
        ("mouseReleased", 0.7),
    ):
        x = left + width * share
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        tools.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)
    wait_until(lambda: "window=" in tools.evaluate("location.search"))
    wait_until_ready(tools, url)
    begin_s, end_s = map(int, tools.evaluate("location.search").split("window=")[1].split("-"))
    assert 1_700_000_000 < begin_s < end_s < 1_700_000_009
    pictures = "document.querySelectorAll('.modebar-btn[data-title*=ownload]').length"
    charts = "document.querySelectorAll('.js-plotly-plot').length"
    assert tools.evaluate(f"{pictures} == {charts} && {charts} > 4"), "each chart can be saved"
    assert tools.evaluate("document.querySelectorAll('.selectionlayer path').length") == 0
    assert faults(tools, url, 1360) == []


def test_the_moment_under_the_pointer_is_marked_on_every_chart_over_time(
    tools: DevTools, ended: tuple[str, Path]
) -> None:
    open_page(tools, f"{ended[0]}/?run=3")
    wait_until_ready(tools, ended[0])
    x, y = tools.evaluate(
        "(() => { const plot = document.querySelector('.js-plotly-plot'); plot.scrollIntoView({block: 'center'});"
        " const box = plot.getBoundingClientRect(), {xaxis, _size} = plot._fullLayout;"
        " return [box.left + xaxis._offset + 0.4 * xaxis._length, box.top + _size.t + 20]; })()"
    )
    tools.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    moments = (
        "[...document.querySelectorAll('.js-plotly-plot')].filter(p => p._fullLayout.xaxis.type == 'date').map(p => {"
        " const line = p.querySelector('.tf-crosshair:not([hidden])'), {xaxis} = p._fullLayout;"
        " return line && xaxis.p2c(parseFloat(line.style.left) - xaxis._offset); })"
    )
    pointed, *others = tools.evaluate(moments)
    assert pointed is None, "Plotly draws its own"
    assert len(others) > 6
    marked = [moment for moment in others if moment is not None]
    assert len(marked) > 3
    assert max(marked) - min(marked) < 1, "milliseconds"
    tools.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert tools.evaluate(moments).count(None) == len(others) + 1


def test_pages_of_a_live_run_refresh_without_errors(tools: DevTools, tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    made = SyntheticRun(sink, _WallClock(), run_info())
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.1):
            if not made.running:
                made.submit(8, 30)
            made.run_steps(1, 0.0)

    engine = threading.Thread(target=work, daemon=True)
    engine.start()
    try:
        with served(tmp_path / "t.db", tmp_path) as url:
            for page in PAGES:
                address = _address(url, page.name)
                open_page(tools, address)
                wait_until_ready(tools, address, "live")
                if page.name in ("overview", "placement"):
                    _wait_for_a_refresh(tools)
                assert faults(tools, address, 1360) == [], page.name
    finally:
        over.set()
        engine.join()
        sink.close()


def _wait_for_a_refresh(tools: DevTools) -> None:
    """Wait for messages after those so far. Events arrive with the answer to a command."""
    before = len(tools.seen.frames)
    wait_until(lambda: tools.evaluate("1") and len(tools.seen.frames) > before + 3, limit_s=30)


class _WallClock(ManualClock):
    """The wall clock; moving it by hand has no effect."""

    def __call__(self) -> float:
        return time.time()

    def __getattribute__(self, name: str) -> object:
        return time.time() if name == "now_s" else super().__getattribute__(name)
