"""The Training page, and what other pages say of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.telemetry.writer import open_sink

from tests.dashboard.app_pages import PAGES, metrics, show, texts, write_database
from tests.dashboard.synthetic_run import training_history


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a server's run and a newer one of training."""
    write_database(tmp_path / "t.db", "none", seconds=2)
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    training_history(sink)
    sink.close()
    return tmp_path / "t.db"


def test_the_page_shows_how_a_run_learns(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    app = show(monkeypatch, path, "training")
    shown = metrics(app)
    assert (shown["Step"], shown["Loss"], shown["Held-out loss, best"]) == ("30 of 40", "2.1000", "2.5667")
    assert (shown["Tokens/s"], shown["Memory"]) == ("256", "3,000 MB")
    assert len(app.get("plotly_chart")) == 6
    assert "strongest = 330. The busiest expert has 2.0 times its even share." in texts(app)


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_servers_show_one_line_for_a_training_run(
    monkeypatch: pytest.MonkeyPatch, path: Path, page: str
) -> None:
    app = show(monkeypatch, path, page)
    notes = [each.value for each in app.info if "training run" in each.value]
    assert len(notes) == (page not in ("training", "machine", "loadtests"))
    assert notes == [] or not app.metric
    assert "· training" in app.selectbox(key="run").options[1]


def test_the_training_page_shows_one_line_for_a_run_of_a_server(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    app = show(monkeypatch, path, "training", run="1")
    assert "twofold finetune --telemetry-url" in texts(app)
    assert not app.get("plotly_chart")
