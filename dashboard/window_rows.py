"""The latest rows of the chosen window and what the pages compute from them, shared by all viewers.

Reading and analysing takes up to a second, so a live run's analysis is renewed every RENEWED_S, not at every refresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import streamlit as st
from twofold.telemetry import queries
from twofold.tools.lab import recorded_run

from dashboard import formats, parts
from dashboard.view import View

RENEWED_S: Final = 20
COMPARED: Final = ("lru", "two-in-eight", "payback", "oracle-payback")
"""Policies that the cache page replays; "oracle-payback" knows the future."""


_REPLAYED_VALUES: Final = 1_500_000
"""Steps × layers × experts that are replayed: about a second for the policies of COMPARED."""


@dataclass(frozen=True)
class Replayed:
    """What the run did in its latest decode steps, and what policies do in them."""

    results: Sequence[recorded_run.StepsReplay]
    """The run's own policy first."""
    hit_rate: float
    """The run's own, as in `results`: share of distinct experts by layer and step."""
    uploads_per_token: float
    num_steps: int
    """Decode steps that are counted."""
    since_start: bool
    """Whether the replay begins where the run did."""
    prefetches: bool
    num_lost: int
    """Tokens that are missing."""

    @property
    def difference(self) -> float:
        """The replay of the run's own policy less the run."""
        return self.results[0].hit_rate - self.hit_rate


class WindowRows:
    """One window's rows. Attributes are computed when first asked for and then kept.

    hits: hits by layer and expert, [layers, experts], as of `View.hits`.
    """

    def __init__(
        self,
        db: queries.Database,
        run: queries.Run,
        span: queries.Window,
        hits: Callable[[], np.ndarray],
    ) -> None:
        self._db, self._run, self._span, self._hits = db, run, span, hits

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
    def replayed(self) -> Replayed | None:
        """COMPARED and the run's own policy in the last steps; None if there are too few or they cannot be replayed."""
        run = self._run
        if recorded_run.why_not_replayed(run) or run.policy not in recorded_run.policy_names():
            return None
        num_steps = _REPLAYED_VALUES // max(1, run.num_layers * run.num_experts)
        rows = self.rows.latest(num_steps)
        steps, middle = queries.recorded_steps(rows), len(rows.steps) // 2
        if middle < 1 or not steps.num_tokens:
            return None
        first, counted = int(rows.steps.step[0]), int(rows.steps.step[middle])
        copies, prefetched = self.copies, self.copies.reason == queries.UploadReason.PREFETCH
        results = list(
            recorded_run.replay_steps(
                run,
                steps,
                list(dict.fromkeys((run.policy, *COMPARED))),
                residents=queries.residency(self._db, run, first - 1, self._hits()),
                first_counted_step=counted,
                foreseen=queries.used_at_once(copies.where(prefetched), rows) if prefetched.any() else None,
            )
        )
        decodes = rows.steps.step[rows.steps.is_decode & (rows.steps.step >= counted)]
        used = np.isin(rows.layers.use_step, decodes)
        if not results or not used.any():
            return None
        is_hit = rows.layers.use_placement[used] == queries.Placement.HIT
        num_tokens = int(rows.steps.num_tokens[np.isin(rows.steps.step, decodes)].sum())
        return Replayed(
            results=results,
            hit_rate=float(is_hit.mean()),
            uploads_per_token=float(np.isin(copies.step, decodes).sum()) / num_tokens,
            num_steps=len(decodes),
            since_start=first == 0,
            prefetches=bool(prefetched.any()),
            num_lost=steps.num_lost,
        )

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
        view.db.path,
        view.run.run_id,
        (view.span.begin_s, view.span.end_s) if view.is_fixed else -1 if whole else length_s,
        state,
        view.db,
        view.run,
        view.span,
        view.hits,
    )


@st.cache_resource(max_entries=6, ttl=3600, show_spinner="Reading the latest rows …")
def _kept(
    path: str,
    run_id: int,
    length_s: int | tuple[int, int],
    state: tuple[object, ...],
    _db: queries.Database,
    _run: queries.Run,
    _span: queries.Window,
    _hits: Callable[[], np.ndarray],
) -> WindowRows:
    return WindowRows(_db, _run, _span, _hits)


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
