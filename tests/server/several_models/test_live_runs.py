"""Two models loaded by one server: two live runs in PostgreSQL, which every dashboard page tells apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import HTTP
from twofold.telemetry import queries

from tests.dashboard.app_pages import PAGES, show, texts
from tests.e2e.waiting import wait_until
from tests.server.several_models.real_server import ask, server
from tests.telemetry.postgres_server import running_server
from tests.tiny_models.writing import TinyModel, write_tiny_model

pytestmark = pytest.mark.xdist_group("postgres")


def states(url: str) -> dict[str, str]:
    """State of each run, by its model."""
    db = queries.open_database(url)
    try:
        return {Path(run.model).name: run.state() for run in queries.runs(db)}
    finally:
        db.engine.dispose()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(server's URL, telemetry URL): one and two layers, both loaded, after an answer of each."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "alpha", TinyModel())
    write_tiny_model(folder / "beta", TinyModel(num_layers=1))
    with running_server() as postgres:
        telemetry = postgres.new_database("live_runs")
        with server(folder, "--models-max", "2", telemetry=telemetry) as url:
            for name, tokens in (("alpha", 24), ("beta", 9)):
                ask(url, name, max_tokens=tokens)
            wait_until(lambda: states(telemetry) == {"alpha": "live", "beta": "live"})
            yield url, telemetry


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_the_live_run_it_names(
    monkeypatch: pytest.MonkeyPatch, live: tuple[str, str], page: str
) -> None:
    for run, name in enumerate(("alpha", "beta"), start=1):
        app = show(monkeypatch, live[1], page, run=str(run), window="all")
        assert f"<b>{name}</b>" in texts(app)
        names = [each.split(" · ") for each in app.selectbox(key="run").options[1:]]
        assert [(each[2], each[-1]) for each in names] == [("beta", "live"), ("alpha", "live")]


def test_tokens_of_a_run_are_those_of_its_model(live: tuple[str, str]) -> None:
    db = queries.open_database(live[1])
    wait_until(lambda: all(queries.requests(db, run) for run in queries.runs(db)))
    reported = {
        Path(run.model).name: [each.completion_tokens for each in queries.requests(db, run)]
        for run in queries.runs(db)
    }
    db.engine.dispose()
    assert reported == {"alpha": [24], "beta": [9]}


def test_unloading_one_model_ends_its_run_only(live: tuple[str, str]) -> None:
    url, telemetry = live
    HTTP.post(f"{url}/models/unload", json={"model": "alpha"}).raise_for_status()
    wait_until(lambda: states(telemetry)["alpha"] == "ended")
    assert states(telemetry)["beta"] == "live"
