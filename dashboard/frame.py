"""A page's frame: title, refresh, the chosen run's header, and hints where there is nothing to show.

A page refreshes while its run is live, and no longer after it has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import streamlit as st
from twofold.api.errors import ConfigError
from twofold.telemetry import queries

from dashboard import controls, pace, parts
from dashboard.view import (
    NEWEST,
    View,
    chosen_run,
    chosen_window,
    database_url,
    view_of,
)

POLL_S: Final = 10.0
"""Seconds between checks for a first run."""
NEWER_RUN_POLL_S: Final = 30.0
"""Seconds between checks for a newer run than the ended one that is shown; a check takes 0.1 s of a busy core."""

_STYLE: Final = f"<style>{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


def _open_database() -> queries.Database | None:
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


def _view() -> View | None:
    """The chosen run in the chosen window; None, with the reason on the page, when there is none."""
    db = _open_database()
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
    return view_of(db, chosen_run(runs), chosen_window())


def live_page(
    title: str,
    lead: str,
    body: Callable[[View], None],
    *,
    refresh: bool = True,
    subject: Callable[[View], View | None] = lambda chosen: chosen,
    kind: queries.RunKind | None = "serving",
) -> None:
    """A page about `subject(view)`, refreshed while that run is live: every two seconds, more rarely if a refresh is
    costly (`pace`).

    If the subject is None (unknown run), there is no header and `body` gets the chosen view. kind: the runs that the
    page is about, of servers or of training; None: both. Of others it says so.
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
        every = pace.interval_s(st.session_state, title)

    @st.fragment(run_every=every)
    def fragment() -> None:
        if controls.was_brushed():
            st.rerun()
        begun_cpu_s = time.thread_time()
        current = _view()
        if current is None:
            return
        try:
            with current.db.one_connection():
                about = subject(current)
                if about is not None:
                    parts.header(about)
                if _is_about(kind, (about or current).run):
                    body(about or current)
        except ConfigError as error:
            st.warning(str(error), icon=":material/database_off:")
            return
        if every is not None and (shown is None or (about is not None and not about.live)):
            st.rerun()  # the first run has begun, or this one has ended: the refresh interval changes
        if every is not None and pace.slow_down(st.session_state, title, time.thread_time() - begun_cpu_s):
            st.rerun()

    fragment()
    if wanted and shown is not None and not shown.live and st.session_state.get("run", NEWEST) == NEWEST:
        _await_newer_run(shown.db)


def _is_about(kind: queries.RunKind | None, run: queries.Run) -> bool:
    """Whether a page about runs of `kind` shows this one; if not, the page says where to look."""
    if kind is None or run.kind == kind:
        return True
    if run.kind == "training":
        parts.note(
            "This is a training run: the page *Training* shows it. Choose a server's run in the sidebar."
        )
    else:
        parts.note("This is a server's run. `twofold finetune --telemetry-url URL` records training.")
    return False


def _probe(subject: Callable[[View], View | None]) -> View | None:
    """The page's subject, or the chosen run if the subject is unknown; None, without a message, if there is no run."""
    with contextlib.suppress(ConfigError):
        if (url := database_url()) and (runs := queries.runs(db := queries.open_database(url))):
            chosen = view_of(db, chosen_run(runs), None)
            return subject(chosen) or chosen
    return None


def _newest_run_id(db: queries.Database) -> int:
    return max((run.run_id for run in queries.runs(db, limit=1)), default=0)


def _await_newer_run(db: queries.Database) -> None:
    """Show a run that begins after the newest has ended; asks for runs only when the database has changed."""
    seen, newest = [db.stamp()], _newest_run_id(db)

    @st.fragment(run_every=NEWER_RUN_POLL_S)
    def wait() -> None:
        stamp = db.stamp()
        if stamp == seen[0]:
            return
        seen[0] = stamp
        with contextlib.suppress(ConfigError):
            if _newest_run_id(queries.open_database(database_url())) != newest:
                st.rerun()

    wait()
