"""The Slow steps page: the slowest steps of the run, each beside its cause."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.dashboard.app_pages import link, show, texts, write_database


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 40 had no core for a while; the collector ran in step 60."""
    path = tmp_path_factory.mktemp("slow") / "t.db"
    write_database(path, "none")
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE step SET num_prefill_tokens = 0, wall_us = 10 * wall_us, cpu_us = 0, engine_cpu_us = 0,"
            " core_wait_us = 9 * wall_us, num_counted_steps = 1, involuntary_switches = 3 WHERE step = 40"
        )
        connection.execute(
            "UPDATE step SET num_prefill_tokens = 0, wall_us = 9 * wall_us, engine_cpu_us = 8 * wall_us,"
            " collection_us = 8 * wall_us, num_full_collections = 1 WHERE step = 60"
        )
    return path


def test_the_slowest_steps_are_listed_with_their_causes(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    app = show(monkeypatch, path, "slow_steps")
    table = app.dataframe[0].value
    assert sorted(table["step"].tolist()[:2]) == [40, 60]
    causes = dict(zip(table["step"].tolist(), table["cause"].tolist(), strict=True))
    assert "another process" in causes[40]
    assert "3 times" in causes[40]
    assert "garbage collection (one of all objects)" in causes[60]
    with sqlite3.connect(path) as connection:
        rows = dict(connection.execute("SELECT step, wall_us FROM step").fetchall())
    for step, wall_ms in zip(table["step"].tolist(), table["wall"].tolist(), strict=True):
        assert wall_ms == pytest.approx(rows[step] / 1e3)
    assert "Requests in this step: [" in texts(app)


def test_the_address_names_the_step(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    app = show(monkeypatch, path, "slow_steps", step="60")
    assert "Python stood still for" in texts(app)
    assert link(app, "step") == "60"
    app = show(monkeypatch, path, "slow_steps", step="7777777")
    assert "Step 7777777 is not among these" in texts(app)
