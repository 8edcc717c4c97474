"""One run at one moment, as pages see it: its queries, cached for all viewers, and the database they go to.

For a live run a result is shared within the same two seconds, for an ended run until the database changes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import streamlit as st
from twofold.telemetry import queries

REFRESH_S: Final = 2.0
WINDOWS: Final[dict[str, tuple[str, int | None]]] = {
    "1m": ("Last minute", 60),
    "5m": ("Last 5 minutes", 300),
    "15m": ("Last 15 minutes", 900),
    "1h": ("Last hour", 3600),
    "all": ("Whole run", None),
}
"""The window's name in an address: its name on the page, and its seconds."""
BETWEEN: Final = "between"
"""The sidebar's choice of a window between two moments, which the session has under BETWEEN as a Window."""
NEWEST: Final = "newest"
DEFAULT_WINDOW: Final = "5m"
SETTLED_S: Final = 60
"""Rows are in the database this long after what they record."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class View:
    """State of a run at one moment."""

    db: queries.Database
    run: queries.Run
    span: queries.Window
    live: bool
    state: tuple[object, ...]
    """Cache key: changes with the database, or every REFRESH_S while the run is live."""
    is_fixed: bool = False
    """Whether the window lies between two chosen moments instead of ending with the run."""

    def query(self, query: Callable[..., _Result], *arguments: object, **named: object) -> _Result:
        """`query(db, run, *arguments, **named)`, cached for all viewers."""
        key = (query.__module__, query.__name__, arguments, *named.items())
        return self._cached(key, lambda: query(self.db, self.run, *arguments, **named))

    def overview(self, span: queries.Window | None = None, *, max_buckets: int = 150) -> queries.Overview:
        """Time series and totals of the view's window, or of another one of its run."""
        span = span or self.span
        return self._cached(
            ("overview", span, max_buckets),
            lambda: self._history().overview(span, max_buckets=max_buckets),
        )

    def placements(self) -> tuple[queries.PlacementGrid, queries.Window]:
        """The placement grid, and the window it covers."""
        if self.is_fixed:
            # Rows of a past window no longer change, and a long one takes seconds to read.
            past = self.span.end_s < time.time() - SETTLED_S
            key = (self.db.path, self.run.run_id, "past" if past else self.state, "placements", self.span)
            return _shared(key, lambda: queries.placements_between(self.db, self.run, self.span)), self.span
        return self._cached(("placements", self.span), lambda: self._history().placements(self.span))

    def hits(self) -> np.ndarray:
        """Hits by layer and expert, [layers, experts]: of the window, and of as many older rows as were read so far."""
        return self._cached(("hits",), lambda: self._history().hits(self.run.num_slots))

    def slowest_steps(self, *, with_prompts: bool) -> list[int]:
        """Numbers of the run's slowest steps by the wall clock, the slowest one first."""
        key = ("slowest", with_prompts)
        return self._cached(
            key,
            lambda: _slowest(
                self.db.path, self.db.identity(), self.run.run_id, with_prompts, self.db, self.run
            ).refresh(),
        )

    def residents(self, step: int, newest: int) -> np.ndarray:
        """Experts in slots after `step`, [layers, experts]; `newest` is the last step that is shown."""
        return self._cached(("residents", step), lambda: self._residents(step, newest))

    def _residents(self, step: int, newest: int) -> np.ndarray:
        found = None
        if step == newest:
            kept = _kept_residents(self.db.path, self.db.identity(), self.run.run_id, self.db, self.run)
            found = kept.after(step, self.hits())
        return queries.residency(self.db, self.run, step, self.hits()) if found is None else found

    def _cached(self, key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        result: _Result = _shared((self.db.path, self.run.run_id, self.state, *key), compute)
        return result

    def of(self, run: queries.Run) -> View:
        """A view of another whole run of the database."""
        return view_of(self.db, run, None)

    def of_run(self, run: queries.Run) -> View:
        """A view of another run of the database in the same window."""
        return replace(self, run=run)

    def _history(self) -> queries.RunHistory:
        return _history(self.db.path, self.db.identity(), self.run.run_id, self.db, self.run)

    @property
    def emulated(self) -> str:
        """Suffix of every figure measured by the run's clock: " (emulated)" or nothing."""
        return " (emulated)" if self.run.emulated else ""


@st.cache_data(max_entries=400, ttl=3600, show_spinner=False)
def _shared(key: tuple[object, ...], _compute: Callable[[], Any]) -> Any:
    return _compute()


@st.cache_resource(max_entries=8, show_spinner="Reading the whole run, once …")
def _history(
    path: str, identity: object, run_id: int, _db: queries.Database, _run: queries.Run
) -> queries.RunHistory:
    """The history shared by all viewers, keyed by database and run."""
    return queries.RunHistory(_db, _run)


@st.cache_resource(max_entries=8, show_spinner="Reading the whole run, once …")
def _slowest(
    path: str, identity: object, run_id: int, with_prompts: bool, _db: queries.Database, _run: queries.Run
) -> queries.SlowestSteps:
    """The slowest steps shared by all viewers, keyed as `_history`."""
    return queries.SlowestSteps(_db, _run, with_prompts=with_prompts)


@st.cache_resource(max_entries=8, show_spinner=False)
def _kept_residents(
    path: str, identity: object, run_id: int, _db: queries.Database, _run: queries.Run
) -> queries.Residents:
    """The latest decisions shared by all viewers, keyed as `_history`."""
    return queries.Residents(_db, _run)


def database_url() -> str:
    """The URL given to `streamlit run dashboard/app.py -- URL`, else TWOFOLD_TELEMETRY_URL, else ""."""
    given = [argument for argument in sys.argv[1:] if "://" in argument]
    return given[0] if given else os.environ.get("TWOFOLD_TELEMETRY_URL", "")


def chosen_run(runs: list[queries.Run]) -> queries.Run:
    """The run that the sidebar names; the newest where it names none of them."""
    wanted = str(st.session_state.get("run", NEWEST))
    return next((run for run in runs if str(run.run_id) == wanted), runs[0])


def chosen_window() -> queries.Window | int | None:
    """The window between two moments or the seconds that the sidebar names; None for the whole run."""
    name = st.session_state.get("window", DEFAULT_WINDOW)
    if name == BETWEEN:
        between: queries.Window | None = st.session_state.get(BETWEEN)
        return between
    return WINDOWS[name][1]


def view_of(db: queries.Database, run: queries.Run, window: queries.Window | int | None) -> View:
    """A run in a window, or in its last seconds (None: all of them) up to this moment."""
    fixed = window if isinstance(window, queries.Window) else None
    last_s = None if isinstance(window, queries.Window) else window
    if not run.is_live():
        span = fixed or queries.window(run, last_s)
        return View(db, run, span, False, db.stamp(), fixed is not None)
    # All viewers within the same two seconds get the same moment, hence the same cached results.
    now_s = time.time() // REFRESH_S * REFRESH_S
    span = fixed or queries.window(run, last_s, now_s=now_s)
    return View(db, run, span, True, (now_s,), fixed is not None)
