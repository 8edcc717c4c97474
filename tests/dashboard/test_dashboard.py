"""The dashboard's pages, run without a browser on databases the real writer made."""

from __future__ import annotations

import re
import sqlite3
import tomllib
from pathlib import Path

import numpy as np
import pytest
import streamlit
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from dashboard import formats, palette, report
from dashboard.pages import PAGES as REGISTERED
from dashboard.placement_sweep import read_sweep
from dashboard.verdict import verdict
from tests.dashboard.app_pages import DASHBOARD, PAGES, answers, metrics, show, texts, write_database
from tests.dashboard.synthetic_run import SyntheticRun, run_info
from tests.e2e.waiting import wait_until
from tests.telemetry import table_queries


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SyntheticRun]:
    path = tmp_path_factory.mktemp("emulated") / "t.db"
    return path, write_database(path, "emulated:rtx4090-pcie4")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SyntheticRun]:
    path = tmp_path_factory.mktemp("real") / "t.db"
    return path, write_database(path, "cuda:0", failures=0)


def test_the_registry_and_the_guide_list_every_page() -> None:
    files = {path.stem for path in (DASHBOARD / "pages").glob("*.py")} - {"__init__", "main"}
    assert {page.name for page in REGISTERED} == files
    guide = (DASHBOARD.parent / "docs/guides/telemetry.md").read_text(encoding="utf-8")
    assert [page.title for page in REGISTERED if f"\n| *{page.title}* |" not in guide] == []


def test_an_idle_run_shows_how_to_send_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info())
    sink.close()
    app = show(monkeypatch, tmp_path / "t.db")
    assert "curl 127.0.0.1:8000/v1/chat/completions" in app.code[0].value
    assert not app.metric


@pytest.mark.parametrize(
    ("parts", "rates", "expected"),
    [
        ({"experts_cpu": 6, "attention": 2, "rest": 2}, (21.0, 30.0), "memory bandwidth: 70% of 30.0 GB/s"),
        ({"experts_cpu": 6, "attention": 2, "rest": 2}, (9.0, 30.0), "experts on the CPU: 60%"),
        ({"experts_cpu": 4, "emit": 2, "rest": 4}, (21.0, 30.0), "Bound by Python: 60%"),
        ({"experts_gpu": 5, "experts_cpu": 4, "rest": 1}, (21.0, 30.0), "Bound by the GPU"),
        ({"attention": 9, "rest": 1}, (None, None), "attention: 90%"),
        ({}, (None, None), ""),
    ],
)
def test_the_verdict_names_what_bounds_the_steps(
    parts: dict[str, float], rates: tuple[float | None, float | None], expected: str
) -> None:
    text = verdict(parts, *rates)
    assert expected in text
    assert bool(text) == bool(parts)


def test_overview_shows_the_queries_results(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, made = emulated
    app = show(monkeypatch, path)
    overview = table_queries.overview(*answers(path))
    shown = metrics(app)
    assert shown["Hit rate"] == f"{made.num_hits / (made.num_hits + made.num_cpu + made.num_fetched):.1%}"
    assert shown["Decode tokens/s"] == formats.rate(overview.steps.decode_tokens_per_wall_s)
    assert f"{overview.steps.decode_tokens_per_clock_s:,.0f} emulated" in [m.delta for m in app.metric]
    uploaded = made.num_uploads * made.info.expert_bytes
    assert shown["PCIe per token"] == formats.size(uploaded / (made.decode_tokens + made.prefill_tokens))
    assert f"{uploaded / (made.virtual_us / 1e6) / 1e9:.2f} GB/s emulated" in [m.delta for m in app.metric]
    at_client = _client_times(path)
    assert shown["TTFT, p50"] == formats.seconds(float(np.percentile(at_client[:, 0], 50)))
    assert shown["TPOT, p50"] == formats.seconds(float(np.percentile(at_client[:, 1], 50)))
    assert shown["Answered / requests"] == f"{made.next_number} / {made.next_number}"
    assert f"{made.decode_tokens:,} decode tokens and {made.prefill_tokens:,} prompt tokens" in texts(app)
    assert f"{made.num_uploads:,} uploads" in texts(app)


def _client_times(path: Path) -> np.ndarray:
    """TTFT, TPOT and end-to-end seconds of the finished requests, by SQL of its own."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT first_token_s - submitted_s, (finished_s - first_token_s) / (completion_tokens - 1), "
            "finished_s - submitted_s FROM request WHERE finish_reason = 'stop' ORDER BY number"
        ).fetchall()
    return np.array(rows)


def test_placement_shows_a_sweep_that_is_named(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun], tmp_path: Path
) -> None:
    sweep = tmp_path / "placement.csv"
    monkeypatch.setenv("TWOFOLD_PLACEMENT_SWEEP", str(sweep))
    head = "model,profile,strategy,ratio,decode_tokens_per_s\n"
    for text, message in (
        ("", "no rows"),
        (head + "a,b,c,x,1\n", "row 1 is not from"),
        (head + "a,b,c,0,nan\n", "finite"),
    ):
        sweep.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_sweep(sweep)
    sweep.write_text(head + "tiny,rtx3060-pcie3,uniform,0.1,12.5\ntiny,rtx3060-pcie3,payback,0.1,13\n")
    app = show(monkeypatch, emulated[0], "placement")
    assert app.selectbox(key="sweep").value == "tiny on rtx3060-pcie3"


@pytest.mark.parametrize("page", PAGES)
def test_every_page_of_an_emulated_run_is_marked_as_emulated(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun], page: str
) -> None:
    app = show(monkeypatch, emulated[0], page)
    assert [
        w.value.startswith("**Emulated.**")
        and "emulated:rtx4090-pcie4" in w.value
        and "restart the server with `--accelerator none`" in w.value
        for w in app.warning
    ] == [True]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_of_a_real_run_is_marked_as_emulated(
    monkeypatch: pytest.MonkeyPatch, real: tuple[Path, SyntheticRun], page: str
) -> None:
    app = show(monkeypatch, real[0], page)
    assert not app.warning
    assert "emulated" not in texts(app).lower()
    assert "cuda:0" in texts(app)


def test_placement_shows_the_shares_of_the_window(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, made = emulated
    app = show(monkeypatch, path, "placement")
    total = made.num_hits + made.num_cpu + made.num_fetched
    shown = metrics(app)
    assert shown["On GPU, hit"] == f"{made.num_hits / total:.1%}"
    assert shown["On GPU, fetched"] == f"{made.num_fetched / total:.1%}"
    assert shown["On CPU"] == f"{made.num_cpu / total:.1%}"
    assert f"**{total:,} uses of experts**" in texts(app)
    for mode in ("Share of hits", "How often used"):
        app = app.radio(key="colour").set_value(mode).run()
        assert not app.exception


def test_an_older_run_and_a_shorter_window_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=4)
    write_database(path, "emulated:rtx3060-pcie3", seconds=4)
    app = show(monkeypatch, path)
    assert len(app.warning) == 1
    app = app.selectbox(key="run").set_value("1").run()
    assert not app.exception
    assert not app.warning
    app = app.selectbox(key="window").set_value("all").run()
    assert not app.exception


@pytest.mark.parametrize("page", PAGES)
def test_without_a_database_every_page_explains_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    app = show(monkeypatch, None, page)
    assert "TWOFOLD_TELEMETRY_URL=" in texts(app)
    app = show(monkeypatch, tmp_path / "none.db", page)
    assert "does not exist" in texts(app)
    assert "twofold serve --telemetry-url" in texts(app)
    (tmp_path / "empty.db").touch()
    app = show(monkeypatch, tmp_path / "empty.db", page)
    assert "is not a telemetry database" in texts(app)
    sink = open_sink(f"sqlite:///{tmp_path / 'ready.db'}")
    sink.close()
    app = show(monkeypatch, tmp_path / "ready.db", page)
    assert "no server has written to it" in texts(app)


@pytest.mark.parametrize("page", PAGES)
def test_a_run_without_a_single_request_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info("none", num_slots=0))
    sink.close()
    app = show(monkeypatch, tmp_path / "t.db", page)
    assert "every expert runs on the CPU" in texts(app)


def test_an_unknown_window_or_token_in_the_address_is_reported(
    monkeypatch: pytest.MonkeyPatch, emulated: tuple[Path, SyntheticRun]
) -> None:
    path, _ = emulated
    app = show(monkeypatch, path, window="9h")
    assert "The address names window `9h`, which is not here: last 5 minutes are shown." in texts(app)
    assert "window `9h`" in texts(app.run()), "a refresh keeps the line"
    assert "window `9h`" not in texts(app.selectbox(key="window").set_value("1h").run())
    app = show(monkeypatch, path, "requests", request="0", token="98765", window="1h")
    assert "token `98765`, which is not here: the slowest token is shown" in texts(app)
    assert "names window" not in texts(app)


def test_lost_events_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info())
    sink.dropped("token_layer", 1234)
    sink.close()
    app = show(monkeypatch, tmp_path / "t.db")
    assert "1,234 events lost" in texts(app)


def test_a_database_that_breaks_while_shown_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=2)
    app = show(monkeypatch, path)
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE step")
    connection.close()
    app = app.run()
    assert not app.exception
    assert "cannot be read: no such table: step" in texts(app)


def test_names_from_outside_are_shown_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info("none", model="<img src=x onerror=alert(1)>"))
    sink.close()
    text = texts(show(monkeypatch, tmp_path / "t.db"))
    assert "<img" not in text
    assert "&lt;img" in text


@pytest.fixture
def intervals(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Every how many seconds the page's fragments ask to be redrawn."""
    requested: list[float | None] = []
    fragment = streamlit.fragment

    def recorder(*, run_every: float | None = None) -> object:
        requested.append(run_every)
        return fragment(run_every=run_every)

    monkeypatch.setattr(streamlit, "fragment", recorder)
    return requested


@pytest.fixture
def num_queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries that are sent to a database, as SQL."""
    sent: list[str] = []
    rows = queries.Database.rows

    def counted(db: queries.Database, query: object) -> list[object]:
        sent.append(str(query))
        return rows(db, query)  # type: ignore[arg-type]

    monkeypatch.setattr(queries.Database, "rows", counted)
    return sent


@pytest.mark.parametrize(
    "page", ["overview", *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:])]
)
def test_an_ended_run_is_drawn_once_and_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    intervals: list[float | None],
    num_queries: list[str],
    page: str,
) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=4)
    app = show(monkeypatch, path, page)
    # What remains looks at the file's time stamp for a newer run.
    assert set(intervals) == {None, 30.0}
    num_queries.clear()
    show(monkeypatch, path, page)  # another viewer
    app.run()
    assert {sql for sql in num_queries if "FROM run" not in sql} == set()
    app = app.selectbox(key="run").set_value("1").run()
    intervals.clear()
    app.run()
    assert set(intervals) == {None}


def test_a_live_run_is_drawn_every_two_seconds_and_no_longer_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, intervals: list[float | None]
) -> None:
    path = tmp_path / "t.db"
    sink = open_sink(f"sqlite:///{path}")
    sink.begin_run(run_info("cuda:0"))
    db = queries.open_database(f"sqlite:///{path}")
    wait_until(lambda: queries.runs(db))
    app = show(monkeypatch, path)
    assert 2.0 in intervals
    sink.close()
    intervals.clear()
    app.run()
    assert 2.0 not in intervals


def test_no_other_host_is_contacted() -> None:
    """Icons given by name as the page's own, and fonts by address, would be fetched by the viewer's browser."""
    folder = DASHBOARD
    for path in [*folder.rglob("*.py"), *folder.glob("*.css"), *folder.glob("*.svg")]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text.replace("http://", "https://"), path.name
        assert 'page_icon=":' not in text
    config = tomllib.loads((folder / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    assert config["browser"]["gatherUsageStats"] is False
    assert "fontFaces" not in config["theme"]
    assert not any("http" in str(value) for value in config["theme"].values())
    for theme in ("light", "dark"):
        colors = config["theme"][theme]
        assert palette.contrast(colors["textColor"], colors["backgroundColor"]) >= 7
        assert palette.contrast(colors["textColor"], colors["secondaryBackgroundColor"]) >= 7


def test_a_report_is_one_file_that_asks_for_nothing(
    emulated: tuple[Path, SyntheticRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = emulated
    out = tmp_path / "run.html"
    assert report.main([f"sqlite:///{path}", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    own = re.sub(r"<script>/\*\*.*?</script>", "", text, count=1, flags=re.DOTALL)  # without Plotly's
    assert not re.findall(r"""(?:src|href)=["']""", own)
    assert "<b>Emulated.</b>" in own
    assert f"{made.next_number:,} finished" in own
    assert own.count("Plotly.newPlot") == 7
    assert report.main([f"sqlite:///{path}", str(tmp_path / "none.html"), "--run", "99"]) == 2
    assert "holds no run 99" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()
