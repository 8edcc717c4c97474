"""Parts shared by all pages: the database, the chosen run and window, the banner, and the hints for an empty page.

A page refreshes while its run is live, and no longer after it has ended. Query results are shared by all viewers: for
a live run within the same two seconds, for an ended run until the file changes.
"""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import streamlit as st
from twofold.api.errors import ConfigError
from twofold.telemetry import queries

from dashboard import figures, formats, palette

REFRESH_S: Final = 2.0
POLL_S: Final = 10.0
"""Seconds between checks for a first or newer run; only the file's time stamp is read until it changes."""
WINDOWS: Final[dict[str, int | None]] = {
    "Last minute": 60,
    "Last 5 minutes": 300,
    "Last 15 minutes": 900,
    "Last hour": 3600,
    "Whole run": None,
}
NEWEST: Final = -1
_Result = TypeVar("_Result")

_STYLE: Final = f"<style>{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


@dataclass(frozen=True)
class View:
    """One run at one moment."""

    db: queries.Database
    run: queries.Run
    span: queries.Window
    live: bool
    state: tuple[object, ...]
    """Cache key: changes with the file, or every REFRESH_S while the run is live."""

    def query(self, query: Callable[..., _Result], *arguments: object, **named: object) -> _Result:
        """`query(db, run, *arguments, **named)`, cached for all viewers."""
        key = (query.__name__, arguments, *named.items())
        return self._cached(key, lambda: query(self.db, self.run, *arguments, **named))

    def overview(self) -> queries.Overview:
        return self._cached(("overview", self.span), lambda: self._history().overview(self.span))

    def placements(self) -> tuple[queries.PlacementGrid, queries.Window]:
        """The placement grid, and the window it covers."""
        return self._cached(("placements", self.span), lambda: self._history().placements(self.span))

    def _cached(self, key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        result: _Result = _shared((self.db.path, self.run.run_id, self.state, *key), compute)
        return result

    def of(self, run: queries.Run) -> View:
        """A view of another whole run of the database."""
        return _view_of(self.db, run, None)

    def _history(self) -> queries.RunHistory:
        inode = Path(self.db.path).stat().st_ino
        return _history(self.db.path, inode, self.run.run_id, self.db, self.run)

    @property
    def emulated(self) -> str:
        """Suffix of every figure measured by the run's clock: " (emulated)" or nothing."""
        return " (emulated)" if self.run.emulated else ""


@st.cache_data(max_entries=200, ttl=3600, show_spinner=False)
def _shared(key: tuple[object, ...], _compute: Callable[[], Any]) -> Any:
    return _compute()


@st.cache_resource(max_entries=8, show_spinner="Reading the whole run, once …")
def _history(
    path: str, inode: int, run_id: int, _db: queries.Database, _run: queries.Run
) -> queries.RunHistory:
    """The history shared by all viewers, keyed by file and run."""
    return queries.RunHistory(_db, _run)


def _file_stamp(path: str) -> tuple[object, ...]:
    """Inode, modification time and size of the database file and its write-ahead log."""
    stamps: list[object] = []
    for name in (path, f"{path}-wal"):
        with contextlib.suppress(OSError):
            status = os.stat(name)
            stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def database_url() -> str:
    """The URL given to `streamlit run dashboard/app.py -- URL`, else TWOFOLD_TELEMETRY_URL, else ""."""
    given = [argument for argument in sys.argv[1:] if "://" in argument]
    return given[0] if given else os.environ.get("TWOFOLD_TELEMETRY_URL", "")


def open_database() -> queries.Database | None:
    """The database; None, with the reason on the page, when it cannot be read."""
    url = database_url()
    if not url:
        _show_hint(
            "No telemetry database given",
            "This dashboard shows the telemetry of a Twofold server. Name its database:",
            "TWOFOLD_TELEMETRY_URL=sqlite:///twofold.db streamlit run dashboard/app.py",
        )
        return None
    try:
        return queries.open_database(url)
    except ConfigError as error:
        _show_hint(
            "No telemetry recorded yet" if "does not exist" in str(error) else "This database cannot be read",
            f"{error}",
            f"twofold serve --telemetry-url {url}",
        )
        return None


def _show_hint(title: str, text: str, command: str) -> None:
    st.subheader(title)
    st.info(text, icon=":material/database:")
    st.markdown("Start the server and the dashboard together with `make run`, or by hand:")
    st.code(command, language="bash")
    st.caption("This page checks again every few seconds.")


def sidebar() -> None:
    """Run and window selectors; their values are kept in the session for `view`."""
    with st.sidebar:
        db, runs = None, []
        with contextlib.suppress(ConfigError):  # the page shows the error
            if url := database_url():
                db = queries.open_database(url)
                runs = queries.runs(db)
        names = {NEWEST: "Newest run"} | {run.run_id: _run_name(run) for run in runs}
        st.selectbox("Run", list(names), format_func=names.__getitem__, key="run")
        st.selectbox(
            "Window", list(WINDOWS), index=1, key="window", help="The part of the run that the page shows."
        )
        st.toggle(
            "Refresh live",
            value=True,
            key="refresh",
            help=f"Read the database every {REFRESH_S:.0f} s while the run is live.",
        )
        if db is not None:
            st.caption(f"Reading `{db.path}`")
        if runs and _chosen(runs).emulated:
            st.caption(":orange[**Emulated:** GPU times are predicted by a cost model.]")


def _chosen(runs: list[queries.Run]) -> queries.Run:
    wanted = st.session_state.get("run", NEWEST)
    return next((run for run in runs if run.run_id == wanted), runs[0])


def _run_name(run: queries.Run) -> str:
    what = "emulated" if run.emulated else run.accelerator
    state = " · live" if run.is_live() else ""
    return f"{run.run_id} · {formats.moment(run.started_s, with_date=True)} · {what}{state}"


def view() -> View | None:
    """The chosen run in the chosen window; None, with the reason on the page, when there is none."""
    db = open_database()
    if db is None:
        return None
    try:
        runs = queries.runs(db)
    except ConfigError as error:
        st.warning(str(error), icon=":material/database_off:")
        return None
    if not runs:
        _show_hint(
            "No run recorded yet",
            f"{db.path} is empty: no server has written to it.",
            f"twofold serve --telemetry-url {database_url()}",
        )
        return None
    run = _chosen(runs)
    return _view_of(db, run, WINDOWS[st.session_state.get("window", "Last 5 minutes")])


def _view_of(db: queries.Database, run: queries.Run, last_s: int | None) -> View:
    if not run.is_live():
        return View(db, run, queries.window(run, last_s), False, _file_stamp(db.path))
    # All viewers within the same two seconds get the same moment, hence the same cached results.
    now_s = time.time() // REFRESH_S * REFRESH_S
    return View(db, run, queries.window(run, last_s, now_s=now_s), True, (now_s,))


def live_page(
    title: str,
    lead: str,
    body: Callable[[View], None],
    *,
    refresh: bool = True,
    subject: Callable[[View], View | None] = lambda chosen: chosen,
) -> None:
    """A page about `subject(view())`, refreshed every two seconds while that run is live.

    If the subject is None (unknown run), there is no header and `body` gets the chosen view.
    """
    st.html(_STYLE)
    st.title(title)
    st.markdown(lead)
    wanted = bool(st.session_state.get("refresh", True))
    shown = _probe(subject)
    every = None
    if wanted and shown is None:
        every = POLL_S  # until there is something to show
    elif wanted and refresh and shown is not None and shown.live:
        every = REFRESH_S

    @st.fragment(run_every=every)
    def fragment() -> None:
        current = view()
        if current is None:
            return
        try:
            about = subject(current)
            if about is not None:
                header(about)
            body(about or current)
        except ConfigError as error:
            st.warning(str(error), icon=":material/database_off:")
            return
        if every is not None and (shown is None or (about is not None and not about.live)):
            st.rerun()  # the first run has begun, or this one has ended: the refresh interval changes

    fragment()
    if wanted and shown is not None and not shown.live and st.session_state.get("run", NEWEST) == NEWEST:
        _await_newer_run(shown.db.path, _newest_run_id(shown.db))


def _probe(subject: Callable[[View], View | None]) -> View | None:
    """The page's subject, or the chosen run if the subject is unknown; None, without a message, if there is no run."""
    with contextlib.suppress(ConfigError):
        if (url := database_url()) and (runs := queries.runs(db := queries.open_database(url))):
            chosen = _view_of(db, _chosen(runs), None)
            return subject(chosen) or chosen
    return None


def _newest_run_id(db: queries.Database) -> int:
    return max((run.run_id for run in queries.runs(db, limit=1)), default=0)


def _await_newer_run(path: str, newest: int) -> None:
    """Show a run that begins after the newest has ended; reads only file stamps until the file changes."""
    seen = [_file_stamp(path)]

    @st.fragment(run_every=POLL_S)
    def wait() -> None:
        stamp = _file_stamp(path)
        if stamp == seen[0]:
            return
        seen[0] = stamp
        with contextlib.suppress(ConfigError):
            if _newest_run_id(queries.open_database(database_url())) != newest:
                st.rerun()

    wait()


def header(current: View) -> None:
    """The run's model and settings, whether it is live, lost events, and whether its times are emulated."""
    run = current.run
    if run.emulated:
        st.warning(
            f"**Emulated.** This machine emulates the GPU: `{run.accelerator}`. Uploads, evictions and answers are "
            "real, but the CPU computes them. GPU and PCIe times are predicted by a cost "
            "model on a virtual clock, not measured.",
            icon=":material/science:",
        )
    if current.live:
        pill = '<span class="tf-pill tf-live">● live</span>'
    else:
        how = "ended" if run.finished_s else "interrupted"
        last_s = run.finished_s or run.last_seen_s
        pill = f'<span class="tf-pill tf-ended">{how} {formats.moment(last_s, with_date=True)}</span>'
    lost = sum(entry.num_events for entry in current.query(queries.dropped))
    if lost:
        pill += f' <span class="tf-pill tf-lost">{lost:,} events lost: figures are too low</span>'
    slots = f"{run.num_slots:,} of {run.num_layers * run.num_experts:,} experts fit on the GPU"
    if not run.num_slots:
        slots = "every expert runs on the CPU"
    policy = f"policy {html.escape(run.policy)} · " if run.has_slots else ""
    model, accelerator = html.escape(formats.last_part(run.model)), html.escape(run.accelerator)
    st.html(
        f'<div class="tf-facts">{pill} &nbsp; <b>{model}</b> · {run.num_layers} MoE layers × {run.num_experts} '
        f"experts, top-{run.top_k} · accelerator <b>{accelerator}</b> · {policy}{slots}</div>"
    )


def card(place: Any, name: str) -> Any:
    """A bordered box within `place` (the page itself or a column); `name` is unique on the page."""
    return place.container(border=True, key=f"card-{name}")


def metrics(*figures: tuple[str, str, str | None]) -> None:
    """A row of figures: label, value and help."""
    columns = st.container(key="figures").columns(len(figures))
    for column, (label, value, text) in zip(columns, figures, strict=True):
        column.metric(label, value, help=text, border=True)


def placement_key() -> None:
    """The legend of placements, the same on every page."""
    entries = [
        (palette.PLACEMENT_COLORS[place], figures.PLACEMENT_NAMES[place]) for place in figures.STACK_ORDER
    ]
    entries.append((palette.UNUSED, "unused"))
    st.html(
        "".join(
            f'<span class="tf-key"><i style="background:{color}"></i>{name}</span>' for color, name in entries
        )
    )


def chart(figure: object, *, key: str) -> None:
    """A Plotly figure in the theme's colours, without Plotly's tool bar; `key` keeps it in place between refreshes."""
    st.plotly_chart(figure, theme="streamlit", key=key, config={"displayModeBar": False})
