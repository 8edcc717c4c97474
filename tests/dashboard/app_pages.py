"""Runs the dashboard's pages without a browser, on databases that the real writer made."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from dashboard.pages import PAGES as REGISTERED
from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, run_info, synthetic_history

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboard"
PAGES = [page.name for page in REGISTERED]


def write_database(path: Path, accelerator: str, *, seconds: int = 8, failures: int = 2) -> SyntheticRun:
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    slots = {"num_slots": 0} if accelerator == "none" else {}
    run = synthetic_history(sink, clock, seconds=seconds, info=run_info(accelerator, **slots))
    run.load_samples("lt-1", 30, failures=failures)
    sink.close()
    return run


def show(
    monkeypatch: pytest.MonkeyPatch, path: Path | str | None, page: str = "overview", **address: str
) -> AppTest:
    """The page as drawn for a new viewer of a file or URL; `address` holds the query parameters of its address."""
    url = path if isinstance(path, str) else "" if path is None else f"sqlite:///{path}"
    monkeypatch.setenv("TWOFOLD_TELEMETRY_URL", url)
    app = AppTest.from_file(str(DASHBOARD / "pages" / "main.py"), default_timeout=60)
    for name, value in address.items():
        app.query_params[name] = value
    if page != PAGES[0]:
        app.switch_page(f"{page}.py")
    app.run()
    assert not app.exception, [item.message for item in app.exception]
    return app


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def link(app: AppTest, name: str) -> str:
    """What the page's address names; AppTest gives a list or a text."""
    value = app.query_params[name]
    return value if isinstance(value, str) else value[0]


def texts(app: AppTest) -> str:
    elements = [*app.markdown, *app.caption, *app.warning, *app.info, *app.title, *app.subheader, *app.code]
    labels = [f"{metric.label} {metric.value} {metric.delta}" for metric in app.metric]
    raw = [element.proto.body for element in app.get("html")]
    return "\n".join([*(element.value for element in elements), *labels, *raw])


def answers(path: Path) -> tuple[queries.Database, queries.Run, queries.Window]:
    db = queries.open_database(f"sqlite:///{path}")
    run = queries.runs(db)[0]
    return db, run, queries.window(run, 300)
