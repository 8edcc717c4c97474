"""Two servers in one PostgreSQL database: every page shows the run it names, and that run's figures only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from streamlit.testing.v1 import AppTest
from twofold.telemetry import queries
from twofold.telemetry.summary import summarise
from twofold.telemetry.writer import open_sink

from tests.dashboard.app_pages import PAGES, metrics, show, texts
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info
from tests.telemetry.postgres_server import running_server

pytestmark = pytest.mark.xdist_group("postgres")

SERVERS = {
    "left": run_info("cuda:0", host="left", num_slots=48, model="left-model"),
    "right": run_info("cuda:0", host="right", num_slots=24, num_layers=4, model="right-model"),
}
SHARED = {"compare", "fleet", "loadtests"}
"""Pages that show more than the chosen run: runs side by side, servers together, tests of all servers."""
WITHOUT_FIGURES = {"compare", "fleet", "lab", "slow_steps", "training"}
"""Pages whose figures are those of both runs, or are drawn only after a button was pressed."""


def record(urls: dict[str, str]) -> None:
    """Both servers write at the same time, in turns, each to its URL."""
    runs = {}
    for seed, (host, info) in enumerate(SERVERS.items()):
        clock = ManualClock()
        runs[host] = SyntheticRun(open_sink(urls[host], now=clock), clock, info, seed=seed)
    for turn in range(6):
        for number, run in enumerate(runs.values()):
            run.submit(prompt_tokens=6 + turn, answer_tokens=20 + 10 * number)
            run.run_steps(10, 0.1)
    for number, (host, run) in enumerate(runs.items()):
        while run.running:
            run.run_steps(1, 0.1)
        run.load_samples(f"lt-{host}", 20 + 10 * number)
        run.sink.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with running_server() as server:
        url = server.new_database("two_servers")
        record(dict.fromkeys(SERVERS, url))
        yield url


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A SQLite file for each server alone."""
    folder = tmp_path_factory.mktemp("apart")
    urls = {host: f"sqlite:///{folder / host}.db" for host in SERVERS}
    record(urls)
    return urls


def drawn(app: AppTest) -> list[str]:
    """What the charts draw: their specifications."""
    return [chart.proto.spec for chart in app.get("plotly_chart")]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_one_servers_figures_and_names_it(
    monkeypatch: pytest.MonkeyPatch, shared: str, separate: dict[str, str], page: str
) -> None:
    seen = {}
    for number, host in enumerate(SERVERS, start=1):
        app = show(monkeypatch, shared, page, run=str(number), window="all")
        other = next(each for each in SERVERS if each != host)
        assert f"host <b>{host}</b>" in texts(app)
        assert f"host <b>{other}</b>" not in texts(app)
        assert {f"· {each} ·" in name for each, name in zip(SERVERS, _run_names(app), strict=True)} == {True}
        seen[host] = metrics(app), drawn(app)
        if page not in SHARED:
            alone = show(monkeypatch, separate[host], page, run="1", window="all")
            assert metrics(app) == metrics(alone)
            # Clock rate and temperature are those of the moment.
            assert page == "machine" or drawn(app) == drawn(alone)
    if page not in WITHOUT_FIGURES:
        assert seen["left"] != seen["right"]


def _run_names(app: AppTest) -> list[str]:
    """Names of the runs in the sidebar, oldest first; its first entry is the newest run."""
    return list(reversed(app.selectbox(key="run").options[1:]))


def test_compare_and_loadtests_name_the_servers(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    compared = texts(show(monkeypatch, shared, "compare", run="1"))
    assert "<td>left</td><td>right</td>" in compared or "<td>right</td><td>left</td>" in compared
    tests = show(monkeypatch, shared, "loadtests")
    options = next(box.options for box in tests.selectbox if box.label == "Load test")
    assert len(options) == 2


def test_fleet_shows_both_servers_together(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    db = queries.open_database(shared)
    requests = {run.host: queries.request_counts(db, run).total for run in queries.runs(db)}
    for number in (1, 2):
        app = show(monkeypatch, shared, "fleet", run=str(number), window="all")
        shown, text = metrics(app), texts(app).replace(' class="tf-text"', "")
        assert shown["Servers"] == "0 of 2 live"
        assert shown["Requests"] == str(sum(requests.values()))
        for place, host in enumerate(SERVERS, start=1):
            row = f"<td>run {place}</td><td>{host}-model</td><td>{host}</td><td>ended</td><td>–</td>"
            assert f"{row}<td>{requests[host]}</td>" in text
        assert "Retried" not in shown
        assert "by load" not in text, "no router, no columns of zeros"


def test_the_database_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    secret = shared.replace("twofold@", "twofold:hunter2@")
    assert "hunter2" not in texts(show(monkeypatch, secret, "machine", run="1"))


def test_both_ways_of_recording_hold_the_same(shared: str, separate: dict[str, str]) -> None:
    """PostgreSQL and SQLite give the same summary for the same run."""
    for number, host in enumerate(SERVERS, start=1):
        here, there = summarise(separate[host]), summarise(shared, run_id=number)
        assert here["hits"] > 0
        assert here == {**there, "run_id": 1}
