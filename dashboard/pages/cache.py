"""Cache: hits over time and by layer, what uploads paid back, and what other policies would have done."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries
from twofold.tools.lab import recorded_run

from dashboard import cpu_only, formats, frame, parts
from dashboard.figures import base, cache
from dashboard.parts import Shown
from dashboard.view import View
from dashboard.window_rows import Replayed, WindowRows, computed_rows

_SAME = 0.0005


def body(view: View) -> None:
    found = computed_rows(view)
    if found is None:
        return
    if not view.run.has_slots:
        cpu_only.explain(
            "Hit rates do not apply: this run has no expert cache. A GPU with slots would hit this often:"
        )
        _reuse(view, found)
        return
    _figures(view, found)
    left, right = st.columns(2)
    overview = view.overview()
    with parts.card(left, "cache-1", "Hit rate over time, all tokens, %"):
        parts.chart(
            base.area(overview.at_s, overview.hit_rate * 100, name="hits", unit="%"),
            key="hit-rate",
            alt="Share of routed experts that hit the GPU cache, over time",
            advice="Falls when the subject changes and recovers: normal. Stays low: more slots.",
        )
    with parts.card(right, "cache-2", "Hit rate by layer, all tokens, %"):
        grid, _ = view.placements()
        parts.chart(
            cache.by_layer(cache.hits_of(grid)),
            key="by-layer",
            alt="Hit rate of each layer",
            advice="Uneven layers: a shared pool (--policy payback) moves slots to where they hit.",
        )
    parts.devices(view, "cache-devices")
    _policies(view, found)
    left, right = st.columns(2)
    with left:
        _reuse(view, found)
    with parts.card(right, "cache-5", "What each upload paid back"):
        if len(found.paybacks.outcome):
            parts.chart(
                cache.payback(found.paybacks),
                key="payback",
                alt="Share of uploads by number of later uses, by reason",
                advice="A tall first group was copied in vain: try --prefetch off, or compare policies above.",
                note=_payback_note(view, found.paybacks),
            )
        else:
            parts.note("No expert was uploaded in these steps.")
    st.caption(f"Computed from {found.extent}.")


def _figures(view: View, found: WindowRows) -> None:
    totals = view.overview().totals
    events = view.query(queries.cache_event_counts)
    uses = found.paybacks.num_uses
    tokens = found.routing.num_tokens
    parts.metrics(
        Shown(
            "Hit rate",
            formats.percent(totals.hit_rate),
            "Routed experts that were on the GPU when needed, each token's counted. Prompt tokens included.",
            "all tokens of the window",
        ),
        Shown(
            "Slots",
            f"{view.run.num_slots:,}",
            None,
            f"{view.run.num_slots / max(1, view.run.num_layers * view.run.num_experts):.0%} of all experts",
        ),
        Shown(
            "Uses per upload",
            f"{float(uses.mean()):.1f}" if len(uses) else formats.NOTHING,
            "Steps that used an uploaded expert before its slot went to another one.",
        ),
        Shown("Upload's price, misses", f"{recorded_run.upload_price(view.run):.2f}", "By the cost model."),
        Shown(
            "Evictions",
            f"{events[queries.CacheEventKind.EVICT]:,}",
            f"Whole run; {events[queries.CacheEventKind.REJECT]:,} uploads were refused as too dear.",
        ),
        Shown("Decode tokens analysed", f"{tokens:,}"),
    )


def _policies(view: View, found: WindowRows) -> None:
    with parts.card(st, "cache-3", "What other policies would have done in the same decode steps"):
        replayed = found.replayed
        if replayed is None:
            _policies_of_tokens(view, found)
            return
        own = replayed.results[0]
        st.markdown(
            f"This run hit {formats.percent(replayed.hit_rate)} in its last {replayed.num_steps:,} decode steps; the "
            f"replay of its policy hits **{formats.percent(own.hit_rate)}** in them: {_nearness(replayed)}"
        )
        parts.chart(
            cache.policies(replayed.results, recorded=replayed.hit_rate, uploads=replayed.uploads_per_token),
            key="policies",
            alt="Hit rate against uploads per token for each cache policy",
            advice="Less time is better. A policy that beats this run's own by more than the difference above: restart "
            "with --policy NAME.",
            note="Hit rate of distinct experts by layer and decode step. The engine's scheduler plays the recorded "
            "steps, prompts included, on a virtual clock; the slots begin as the run's did. The oracle knows the "
            "future.",
        )
        parts.wide(cache.replay_table(replayed.results), "Policies, replayed")


def _nearness(replayed: Replayed) -> str:
    """How near the replay of the run's own policy comes to the run, and what it lacks."""
    if abs(replayed.difference) < _SAME:
        return "the same."
    lacks = []
    if replayed.prefetches:
        lacks.append("what the routers foresaw is not recorded")
    if not replayed.since_start:
        lacks.append("the window begins within the run, and what the policy had learned is not recorded")
    if replayed.num_lost:
        lacks.append(f"{replayed.num_lost:,} tokens were lost")
    why = "; ".join(lacks) or "copies on a real link take other times than on the virtual clock"
    return f"{replayed.difference * 100:+.1f} percentage points, as {why}."


def _policies_of_tokens(view: View, found: WindowRows) -> None:
    """A replay without time, for runs whose steps cannot be played."""
    results = found.compared
    if not results:
        parts.note("Too few decode tokens in this window to warm up a cache and to compare policies.")
        return
    recorded = found.halves[1]
    second = found.copies.step >= found.first_replayed_step
    why = recorded_run.why_not_replayed(view.run)
    parts.chart(
        cache.policies(
            results, recorded=recorded.hit_rate, uploads=float(second.sum()) / recorded.num_tokens
        ),
        key="policies",
        alt="Hit rate against uploads per token for each cache policy",
        advice="Up and to the left is better. A policy that beats this run in both: restart with --policy NAME.",
        note=f"The core's own replay of the last {recorded.num_tokens:,} decode tokens, warmed up on the "
        f"{found.halves[0].num_tokens:,} before them; {view.run.num_slots:,} slots, batch {recorded.batch}. "
        "The oracle knows the future and starts with empty slots. It does not reproduce this run, which also has "
        f"prefetches, the prompts' uploads and copies that take time{f': {why}' if why else ''}.",
    )
    costs = [each.cost_per_token for each in results]
    lru = next(cost for each, cost in zip(results, costs, strict=True) if each.policy == "lru")
    parts.wide(cache.policy_table(results, costs, lru), "Policies, replayed")
    st.caption(f"Cost: misses + {results[0].price:.2f} × uploads, per token of all layers.")


def _reuse(view: View, found: WindowRows) -> None:
    with parts.card(st, "cache-4", "Reuse: hit rate of an LRU cache by its size"):
        if not found.routing.num_tokens:
            parts.note("No decode token in this window.")
            return
        per_layer = view.run.num_slots / max(1, view.run.num_layers)
        rates = found.lru_curve
        half = int(np.searchsorted(rates, 0.5))
        parts.chart(
            cache.lru_curve(
                rates,
                num_slots=per_layer,
                hit_rate=found.routing.hit_rate if view.run.has_slots else None,
            ),
            key="reuse",
            alt="Hit rate of an LRU cache by slots per layer",
            advice="Steep at this run's point: a few more slots help much. Flat: spend the memory elsewhere.",
            note=f"Decode tokens one by one. Half of all uses come back within {half} other experts of their layer.",
        )


def _payback_note(view: View, paybacks: queries.Paybacks) -> str:
    wasted = int((paybacks.outcome == queries.UploadOutcome.WASTED).sum())
    waiting = int((paybacks.outcome == queries.UploadOutcome.WAITING).sum())
    return (
        f"{len(paybacks.outcome):,} uploads: {wasted:,} never used, {waiting:,} still in their slots without a use. "
        f"An upload costs as much as {recorded_run.upload_price(view.run):.2f} misses."
    )


frame.live_page(
    "Cache",
    "A GPU slot is rented, an upload is bought: does the cache keep the right experts, and did the uploads pay?",
    body,
)
