"""The latest rows of the chosen window and what the pages compute from them, shared by all viewers.

Reading and analysing takes up to a second, so a live run's analysis is renewed every RENEWED_S, not at every refresh.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import streamlit as st
from twofold.telemetry import queries
from twofold.tools.lab import recorded_run

from dashboard import formats, parts
from dashboard.view import View

RENEWED_S: Final = 20
COMPARED: Final = ("lru", "two-in-eight", "payback", "oracle-payback")
"""Policies that the cache page replays; "oracle-payback" knows the future."""


class WindowRows:
    """One window's rows. Attributes are computed when first asked for and then kept."""

    def __init__(self, db: queries.Database, run: queries.Run, span: queries.Window) -> None:
        self._db, self._run, self._span = db, run, span

    @cached_property
    def rows(self) -> queries.LayerRows:
        return queries.layer_rows(self._db, self._run, self._span)

    @cached_property
    def steps(self) -> queries.StepRows:
        return queries.step_rows(self._db, self._run, self._span)

    @cached_property
    def copies(self) -> queries.CopyRows:
        return queries.copy_rows(self._db, self._run, self.steps)

    @cached_property
    def copied_steps(self) -> queries.StepRows:
        """The steps that `copies` covers: all of the window, unless there are more copies than are read."""
        if len(self.copies) < queries.MAX_COPIES:
            return self.steps
        return self.steps.since(int(self.copies.step[0]))

    @cached_property
    def link(self) -> queries.LinkSeries:
        return queries.link_series(self.copies, self.copied_steps)

    @cached_property
    def reasons(self) -> list[queries.ReasonTotals]:
        return queries.copies_by_reason(self.copies)

    @cached_property
    def paybacks(self) -> queries.Paybacks:
        return queries.paybacks(self.copies, self.rows)

    @cached_property
    def routing(self) -> queries.RecordedRouting:
        return queries.recorded_routing(self.rows)

    @cached_property
    def _parts(self) -> tuple[queries.LayerRows, queries.LayerRows]:
        return self.rows.halves(recorded_run.affordable_tokens(self._run))

    @cached_property
    def halves(self) -> tuple[queries.RecordedRouting, queries.RecordedRouting]:
        """Tokens that warm a cache up, and the tokens after them that are replayed: about a second's work."""
        before, after = self._parts
        return queries.recorded_routing(before), queries.recorded_routing(after)

    @property
    def first_replayed_step(self) -> int:
        steps = self._parts[1].steps.step
        return int(steps[0]) if len(steps) else 0

    @cached_property
    def lru_curve(self) -> queries.F64:
        return queries.lru_hit_rate(queries.stack_distances(self.routing))

    @cached_property
    def compared(self) -> Sequence[recorded_run.PolicyResult]:
        """COMPARED and the run's own policy on the last tokens, after those before; empty if too few."""
        before, after = self.halves
        if not before.num_tokens or not after.num_tokens:
            return []
        names = dict.fromkeys((*COMPARED, self._run.policy))
        return list(
            recorded_run.replay_policies(
                recorded_run.trace_of(after, self._run),
                [name for name in names if name in recorded_run.policy_names()],
                num_slots=self._run.num_slots,
                price=recorded_run.upload_price(self._run),
                batch=after.batch,
                warm_up=recorded_run.trace_of(before, self._run),
            )
        )

    @cached_property
    def cpu(self) -> queries.CpuBandwidth:
        return queries.cpu_bandwidth(self.rows, self._run.expert_bytes)

    @property
    def extent(self) -> str:
        """Time range of the rows, for a caption."""
        steps = self.rows.steps
        if not len(steps):
            return "no steps"
        since = formats.moment(float(steps.started_s[0]))
        until = formats.moment(float(steps.started_s[-1]))
        return (
            f"{len(steps):,} steps from {since} to {until}, {len(self.rows):,} rows of one token in one layer"
        )


def window_rows(view: View) -> WindowRows:
    """The analysis of the view's run and window."""
    state: tuple[object, ...] = view.db.stamp()
    length_s = view.span.end_s - view.span.begin_s
    if view.live:
        state = (int(time.time()) // RENEWED_S,)
    whole = view.span.begin_s <= int(view.run.started_s)
    return _kept(
        view.db.path, view.run.run_id, -1 if whole else length_s, state, view.db, view.run, view.span
    )


@st.cache_resource(max_entries=6, ttl=3600, show_spinner="Reading the latest rows …")
def _kept(
    path: str,
    run_id: int,
    length_s: int,
    state: tuple[object, ...],
    _db: queries.Database,
    _run: queries.Run,
    _span: queries.Window,
) -> WindowRows:
    return WindowRows(_db, _run, _span)


def computed_rows(view: View) -> WindowRows | None:
    """The window's rows for a page about tokens; None, with the reason on the page, if there are none."""
    if not parts.has_level(view, "expert"):
        return None
    found = window_rows(view)
    if len(found.rows):
        return found
    parts.note(
        "No token was computed in this window. Send a request, or choose a longer window in the sidebar."
    )
    return None
