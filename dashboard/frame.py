"""What every page shares: the database, the chosen run and window, the banner, the explanations when there is nothing.

Pages call `view()` inside their live fragment, so that each refresh reads the database anew.
"""

from __future__ import annotations

import contextlib
import html
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import streamlit as st
from twofold.errors import ConfigError
from twofold.telemetry import queries

from dashboard import figures, formats

REFRESH_S: Final = 2.0
WINDOWS: Final[dict[str, int | None]] = {
    "Last minute": 60,
    "Last 5 minutes": 300,
    "Last 15 minutes": 900,
    "Last hour": 3600,
    "Whole run": None,
}
NEWEST: Final = -1

_STYLE: Final = f"<style>{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


@dataclass(frozen=True)
class View:
    """One look at one run."""

    db: queries.Database
    run: queries.Run
    span: queries.Window
    live: bool

    @property
    def emulated(self) -> str:
        """Behind every figure of the run's clock: " (emulated)" or nothing."""
        return " (emulated)" if self.run.emulated else ""


def database_url() -> str:
    """From `streamlit run dashboard/app.py -- URL`, else TWOFOLD_TELEMETRY_URL, else nothing."""
    given = [argument for argument in sys.argv[1:] if "://" in argument]
    return given[0] if given else os.environ.get("TWOFOLD_TELEMETRY_URL", "")


def open_database() -> queries.Database | None:
    """The database; None, and the reason on the page, when it cannot be read."""
    url = database_url()
    if not url:
        _explain(
            "No telemetry database chosen",
            "This dashboard shows what a Twofold server recorded. Tell it where:",
            "TWOFOLD_TELEMETRY_URL=sqlite:///twofold.db streamlit run dashboard/app.py",
        )
        return None
    try:
        return queries.open_database(url)
    except ConfigError as error:
        _explain(
            "Nothing recorded here yet"
            if "does not exist" in str(error)
            else "This database cannot be shown",
            f"{error}",
            f"twofold serve --telemetry-url {url}",
        )
        return None


def _explain(title: str, text: str, command: str) -> None:
    st.subheader(title)
    st.info(text, icon=":material/database:")
    st.markdown("Start the server and the dashboard together with `make run`, or by hand:")
    st.code(command, language="bash")
    st.caption("This page looks again every few seconds.")


def sidebar() -> None:
    """Run and window; kept in the session, read back by `view`."""
    with st.sidebar:
        db, runs = None, []
        with contextlib.suppress(ConfigError):  # the page explains it
            if url := database_url():
                db = queries.open_database(url)
                runs = queries.runs(db)
        names = {NEWEST: "Newest run"} | {run.run_id: _run_name(run) for run in runs}
        st.selectbox("Run", list(names), format_func=names.__getitem__, key="run")
        st.selectbox(
            "Window", list(WINDOWS), index=1, key="window", help="The stretch of the run that is shown."
        )
        st.toggle(
            "Refresh live", value=True, key="refresh", help=f"Reads the database every {REFRESH_S:.0f} s."
        )
        if db is not None:
            st.caption(f"Reading `{db.path}`")
        if runs and _chosen(runs).emulated:
            st.caption(":orange[**Emulated:** GPU times are a cost model's.]")


def _chosen(runs: list[queries.Run]) -> queries.Run:
    wanted = st.session_state.get("run", NEWEST)
    return next((run for run in runs if run.run_id == wanted), runs[0])


def _has_run() -> bool:
    with contextlib.suppress(ConfigError):
        return bool(queries.runs(queries.open_database(database_url()), limit=1))
    return False


def _run_name(run: queries.Run) -> str:
    what = "emulated" if run.emulated else run.accelerator
    state = " · live" if run.is_live() else ""
    return f"{run.run_id} · {formats.moment(run.started_s, with_date=True)} · {what}{state}"


def view() -> View | None:
    """The chosen run in the chosen window; None, and the reason on the page, when there is none."""
    db = open_database()
    if db is None:
        return None
    try:
        runs = queries.runs(db)
    except ConfigError as error:
        st.warning(str(error), icon=":material/database_off:")
        return None
    if not runs:
        _explain(
            "No run recorded yet",
            f"{db.path} is ready, but no server has written to it.",
            f"twofold serve --telemetry-url {database_url()}",
        )
        return None
    run = _chosen(runs)
    last_s = WINDOWS[st.session_state.get("window", "Last 5 minutes")]
    return View(db, run, queries.window(run, last_s), run.is_live())


def live_page(title: str, lead: str, body: Callable[[View], None], *, refresh: bool = True) -> None:
    """A page whose body is drawn anew every few seconds while a run lives or is awaited."""
    st.html(_STYLE)
    st.title(title)
    st.markdown(lead)
    wanted = st.session_state.get("refresh", True) and (refresh or not _has_run())
    every = REFRESH_S if wanted else None

    @st.fragment(run_every=every)
    def fragment() -> None:
        current = view()
        if current is None:
            return
        try:
            header(current)
            body(current)
        except ConfigError as error:
            st.warning(str(error), icon=":material/database_off:")

    fragment()


def header(current: View) -> None:
    """Whose figures these are, whether it lives, what was lost, and above all whether they are emulated."""
    run = current.run
    if run.emulated:
        st.warning(
            f"**Emulated.** This machine plays the GPU: `{run.accelerator}`. Experts really move, stay and are "
            "evicted, and the answers are real, but the CPU computes them: GPU and PCIe times are a cost model's "
            "on a virtual clock, not measurements.",
            icon=":material/science:",
        )
    if current.live:
        pill = '<span class="tf-pill tf-live">● live</span>'
    else:
        how = "ended" if run.finished_s else "broke off"
        last_s = run.finished_s or run.last_seen_s
        pill = f'<span class="tf-pill tf-ended">{how} {formats.moment(last_s, with_date=True)}</span>'
    lost = sum(entry.num_events for entry in queries.dropped(current.db, run))
    if lost:
        pill += f' <span class="tf-pill tf-lost">{lost:,} events lost, figures are too low</span>'
    slots = f"{run.num_slots:,} of {run.num_layers * run.num_experts:,} experts fit on the GPU"
    if not run.num_slots:
        slots = "every expert runs on the CPU"
    model, accelerator, policy = (
        html.escape(text) for text in (formats.last_part(run.model), run.accelerator, run.policy)
    )
    st.html(
        f'<div class="tf-facts">{pill} &nbsp; <b>{model}</b> · {run.num_layers} MoE layers × {run.num_experts} '
        f"experts, top-{run.top_k} · accelerator <b>{accelerator}</b> · policy {policy} · {slots}</div>"
    )


def card(place: Any, name: str) -> Any:
    """A white box within `place` (the page itself or a column); `name` is its own on the page."""
    return place.container(border=True, key=f"card-{name}")


def placement_key() -> None:
    """The legend that placements have on every page."""
    entries = [
        (figures.PLACEMENT_COLORS[place], figures.PLACEMENT_NAMES[place]) for place in figures.STACK_ORDER
    ]
    entries.append((figures.UNUSED, "unused"))
    st.html(
        "".join(
            f'<span class="tf-key"><i style="background:{color}"></i>{name}</span>' for color, name in entries
        )
    )


def chart(figure: object, *, key: str) -> None:
    """A Plotly figure without Plotly's tool bar; `key` keeps it in place between refreshes."""
    st.plotly_chart(figure, theme=None, key=key, config={"displayModeBar": False})
