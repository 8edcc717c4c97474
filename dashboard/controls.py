"""The sidebar: which run, which window, and whether pages refresh.

The brush chooses the window too: a stretch of a chart over time that the viewer drags across.
"""

from __future__ import annotations

import contextlib
import math
import re
from datetime import datetime
from typing import Final

import streamlit as st
from twofold.api.errors import ConfigError
from twofold.telemetry import queries

from dashboard import formats, links
from dashboard.view import (
    BETWEEN,
    DEFAULT_WINDOW,
    NEWEST,
    REFRESH_S,
    WINDOWS,
    chosen_run,
    chosen_window,
    database_url,
)

_WINDOW_NAMES: Final = {name: title for name, (title, _) in WINDOWS.items()} | {
    BETWEEN: "Between two moments"
}
_BRUSHED: Final = "brushed"


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
        links.publish("run", st.session_state["run"], NEWEST)
        _window(chosen_run(runs) if runs else None)
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


def _window(run: queries.Run | None) -> None:
    """Which part of the run the page shows: its last minutes, all of it, or a stretch between two moments."""
    state = st.session_state
    in_address = re.fullmatch(r"(\d{9,10})-(\d{9,10})", links.requested("window") or "")
    if "window" not in state and in_address and int(in_address[1]) < int(in_address[2]):
        state["window"], state[BETWEEN] = BETWEEN, queries.Window(*map(int, in_address.groups()))
    links.adopt("window", "window", WINDOWS, instead=f"{WINDOWS[DEFAULT_WINDOW][0].lower()} are shown")
    state.setdefault("window", DEFAULT_WINDOW)
    st.selectbox(
        "Window",
        list(_WINDOW_NAMES),
        format_func=_WINDOW_NAMES.__getitem__,
        key="window",
        help="The part of the run that the page shows. Drag across a chart over time to choose a stretch.",
    )
    if state["window"] == BETWEEN and run is not None:
        if BETWEEN not in state:
            state[BETWEEN] = queries.window(run, WINDOWS[DEFAULT_WINDOW][1])
        _moments(state[BETWEEN])
    shown = chosen_window()
    value = f"{shown.begin_s}-{shown.end_s}" if isinstance(shown, queries.Window) else state["window"]
    links.publish("window", value, DEFAULT_WINDOW)


def _moments(span: queries.Window) -> None:
    """Fields for the window's begin and end, in local time of this machine."""
    texts = [datetime.fromtimestamp(at_s).isoformat(" ") for at_s in (span.begin_s, span.end_s)]
    typed = [
        st.text_input(label, text, key=f"{label}-{text}")  # the key: a new window renews the field
        for label, text in zip(("From", "To"), texts, strict=True)
    ]
    try:
        begin_s, end_s = (int(datetime.fromisoformat(text.strip()).timestamp()) for text in typed)
    except (ValueError, OverflowError):
        st.caption(f":orange[Not a moment. Expected one such as {texts[0]}.]")
        return
    if begin_s >= end_s:
        st.caption(":orange[The window ends before it begins.]")
    elif (begin_s, end_s) != (span.begin_s, span.end_s):
        st.session_state[BETWEEN] = queries.Window(begin_s, end_s)
        st.rerun()


def window_name() -> str:
    """The window that charts show now, as a part of their keys."""
    name = st.session_state.get("window", DEFAULT_WINDOW)
    span: queries.Window | None = st.session_state.get(BETWEEN)
    return f"{span.begin_s}-{span.end_s}" if name == BETWEEN and span else str(name)


def brush(key: str) -> None:
    """Callback of the chart `key`: make the stretch that was selected on it the window."""
    boxes = st.session_state[key]["selection"]["box"]
    if not boxes:
        return
    ends = sorted(datetime.fromisoformat(str(at)).timestamp() for at in boxes[0]["x"])
    begin_s = math.floor(ends[0])
    st.session_state["window"] = BETWEEN
    st.session_state[BETWEEN] = queries.Window(begin_s, max(math.ceil(ends[1]), begin_s + 1))
    st.session_state[_BRUSHED] = True


def was_brushed() -> bool:
    """Whether `brush` was called since the last question: the sidebar, outside of the page's fragment, is then old."""
    return bool(st.session_state.pop(_BRUSHED, False))


def run_name(run: queries.Run) -> str:
    """A run in one line: number, name and tags, begin, model, host if recorded, accelerator, and whether it is live."""
    what = "emulated" if run.emulated else "CPU only" if run.accelerator == "none" else run.accelerator
    what = "training" if run.kind == "training" else what
    begin, model = formats.moment(run.started_s, with_date=True), formats.last_part(run.model)
    tags = " ".join(f"#{tag}" for tag in run.run_tags.split(",") if tag)
    parts = [str(run.run_id), run.run_name, tags, begin, model, getattr(run, "host", ""), what]
    return " · ".join([*filter(None, parts), *(["live"] if run.is_live() else [])])
