"""The sidebar: which run, which window, and whether pages refresh."""

from __future__ import annotations

import contextlib

import streamlit as st
from twofold.api.errors import ConfigError
from twofold.telemetry import queries

from dashboard import formats, links
from dashboard.view import DEFAULT_WINDOW, NEWEST, REFRESH_S, WINDOWS, chosen_run, database_url


def sidebar() -> None:
    """Run and window selectors; their values are in the session for `view` and in the address."""
    with st.sidebar:
        db, runs = None, []
        with contextlib.suppress(ConfigError):  # the page shows the error
            if url := database_url():
                db = queries.open_database(url)
                runs = queries.runs(db)
        names = {NEWEST: "Newest run"} | {str(run.run_id): run_name(run) for run in runs}
        if not links.adopt("run", "run", names):
            st.warning(f"Run {links.requested('run')} is not in this database; the newest is shown.")
        st.selectbox("Run", list(names), format_func=names.__getitem__, key="run")
        links.adopt("window", "window", WINDOWS, instead=f"{WINDOWS[DEFAULT_WINDOW][0].lower()} are shown")
        st.session_state.setdefault("window", DEFAULT_WINDOW)
        st.selectbox(
            "Window",
            list(WINDOWS),
            format_func=lambda name: WINDOWS[name][0],
            key="window",
            help="The part of the run that the page shows.",
        )
        links.publish("run", st.session_state["run"], NEWEST)
        links.publish("window", st.session_state["window"], DEFAULT_WINDOW)
        st.toggle(
            "Refresh live",
            value=True,
            key="refresh",
            help=f"Read the database every {REFRESH_S:.0f} s while the run is live; up to 30 s if that is costly.",
        )
        if db is not None:
            st.caption(f"Reading `{formats.last_part(db.path)}`", help=f"`{db.path}`")
        if runs and chosen_run(runs).emulated:
            st.caption(":orange[**Emulated:** GPU times are predicted by a cost model.]")


def run_name(run: queries.Run) -> str:
    """A run in one line: number, name and tags, begin, model, host if recorded, accelerator, and whether it is live."""
    what = "emulated" if run.emulated else "CPU only" if run.accelerator == "none" else run.accelerator
    what = "training" if run.kind == "training" else what
    begin, model = formats.moment(run.started_s, with_date=True), formats.last_part(run.model)
    tags = " ".join(f"#{tag}" for tag in run.run_tags.split(",") if tag)
    parts = [str(run.run_id), run.run_name, tags, begin, model, getattr(run, "host", ""), what]
    return " · ".join([*filter(None, parts), *(["live"] if run.is_live() else [])])
