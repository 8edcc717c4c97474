"""Placement: which experts are in GPU slots now or at any step, where experts ran, and which are popular."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import cpu_only, formats, frame, links, parts, placement_sweep
from dashboard.figures import base, experts
from dashboard.parts import Shown
from dashboard.view import View
from dashboard.window_rows import WindowRows, window_rows

MODES = {
    "Share of hits": "hit share",
    "Where it ran most": "place",
    "How often used": "uses",
}
# From so many experts per layer on, squares are too small for colours by place and counts at the pointer.
LARGE = 128


def body(view: View) -> None:
    if not parts.has_level(view, "layer"):
        return
    grid, span = view.placements()
    total = int(grid.total.sum())
    stretch = f"{formats.moment(span.begin_s)} to {formats.moment(span.end_s)}"
    if not total:
        parts.note(
            f"No expert was used from {stretch}. Send a request, or choose a longer window in the sidebar."
        )
        placement_sweep.card()
        return
    found = window_rows(view)
    _uses(view, grid, f"**{total:,} uses of experts** from {stretch}")
    if view.run.has_slots:
        _residency(view, grid, found)
        _hottest(view, grid, found)
    else:
        cpu_only.explain(
            "Residency and placement charts do not apply: this run has no expert slots on a GPU."
        )
        if parts.has_level(view, "expert"):
            cpu_only.bandwidth(view, found)
    _map(view, grid)
    _popularity(grid)
    placement_sweep.card()


def _uses(view: View, grid: queries.PlacementGrid, title: str) -> None:
    counts = {place: grid.by_placement(place) for place in queries.Placement}
    total = int(grid.total.sum())
    used = Shown("Experts used", f"{int((grid.total > 0).sum()):,}", None, f"of {grid.total.size:,}")
    with parts.card(st, "placement-1"):
        st.markdown(title)
        if not view.run.has_slots:
            top = -(-grid.total.shape[1] // 10)
            hottest = np.sort(grid.total, axis=1)[:, -top:].sum() / total
            parts.metrics(
                used,
                Shown("Uses by the top tenth", formats.percent(float(hottest)), "Of each layer's experts."),
            )
            return
        parts.chart(
            base.share_bar(counts),
            key="share",
            alt="Uses of experts by where they ran",
            advice="Mostly blue: more slots with --gpu-experts-ratio. Much orange: the link is the limit.",
        )
        parts.metrics(
            Shown("On GPU, hit", formats.percent(counts[queries.Placement.HIT] / total)),
            Shown("On GPU, fetched", formats.percent(counts[queries.Placement.FETCHED] / total)),
            Shown("On CPU", formats.percent(counts[queries.Placement.CPU] / total)),
            used,
        )


def _residency(view: View, grid: queries.PlacementGrid, found: WindowRows) -> None:
    with parts.card(st, "placement-3", "Experts in GPU slots"):
        if not parts.has_level(view, "expert"):
            return
        steps = found.steps
        if not len(steps):
            parts.note("No step in this window.")
            return
        step = _scrubber(steps)
        there = view.residents(step, int(steps.step[-1]))
        at = int(np.searchsorted(steps.step, step))
        ranked = st.toggle("Most used experts first", value=grid.total.shape[1] > LARGE, key="ranked-slots")
        shown = experts.by_rank(there, grid.total[: len(there)]) if ranked else there
        layers = (there > 0).sum(axis=1)
        parts.chart(
            experts.experts_map(
                np.asarray(shown, np.uint8),
                scale="resident",
                ranked=ranked,
                num_devices=len(view.run.devices),
            ),
            key="residency",
            alt=f"Heatmap of MoE layers and experts: those in GPU slots after step {step}",
            advice="Green far from the left when sorted by use: the cache keeps unpopular experts; compare "
            "policies on Cache.",
            note=f"After step {step:,} at {formats.moment(float(steps.started_s[at]))}: {int(layers.sum()):,} of "
            f"{view.run.num_slots:,} slots filled, {int(layers.min())} to {int(layers.max())} per layer"
            f"{_by_device(view, there)}.",
        )


def _hottest(view: View, grid: queries.PlacementGrid, found: WindowRows) -> None:
    if view.run.telemetry_level != "expert" or not len(found.steps):
        return
    with parts.card(st, "placement-5", "The hottest experts"):
        newest = int(found.steps.step[-1])
        rows = queries.hottest(grid, found.copies, view.residents(newest, newest))
        st.dataframe(
            [
                {
                    "layer": each.layer,
                    "expert": each.expert,
                    "uses": each.uses,
                    "hit rate, %": round(100 * each.hit_rate, 1),
                    "uploads": each.uploads,
                    "in a slot": each.resident,
                    "since step": each.since_step,
                }
                for each in rows
            ],
            hide_index=True,
            key="hottest",
        )
        st.html(
            '<p class="tf-advice"><b aria-hidden="true">→</b> Many uses beside a low hit rate: the slots of its '
            "layer are too few, or go to others. A click on a column's title sorts by it. No step: it was there "
            "before the window.</p>"
        )


def _by_device(view: View, there: np.ndarray) -> str:
    """How many experts each of several devices has, with the colour of its squares."""
    names = view.run.devices
    if len(names) < 2:
        return ""
    counts = [int((there == number).sum()) for number in range(1, len(names) + 1)]
    return ": " + ", ".join(
        f"{count:,} on {name} ({color})"
        for count, name, color in zip(counts, names, experts.DEVICE_COLOR_NAMES, strict=False)
    )


def _scrubber(steps: queries.StepRows) -> int:
    """The step to show, chosen by time; the last one until the viewer moves the slider."""
    moments_s = np.linspace(steps.started_s[0], steps.started_s[-1], min(len(steps), 500))
    found = np.unique(np.searchsorted(steps.started_s, moments_s))
    shown = steps.step[found].tolist()
    at_s = dict(zip(shown, steps.started_s[found].tolist(), strict=True))
    if len(shown) < 2:
        return int(shown[0])
    wanted = links.requested("step") or ""
    between = wanted.isdigit() and shown[0] <= int(wanted) <= shown[-1]
    allowed = sorted({*shown, int(wanted)}) if between else shown  # else the nearest is shown
    links.adopt("step", "placement-step", allowed, instead="the latest step is shown")
    state = st.session_state
    chosen = state.get("placement-step", shown[-1])
    if chosen == state.get("placement-last"):
        chosen = shown[-1]  # not moved by the viewer: follows a live run
    if chosen not in at_s:
        chosen = min(shown, key=lambda step: abs(step - chosen))
    state["placement-step"], state["placement-last"] = chosen, shown[-1]
    step = st.select_slider(
        "At time",
        shown,
        key="placement-step",
        format_func=lambda each: f"{formats.moment(at_s[each])}, step {each:,}",
    )
    links.publish("step", step, shown[-1])
    return int(step)


def _map(view: View, grid: queries.PlacementGrid) -> None:
    modes = list(MODES) if view.run.has_slots else ["How often used"]
    if grid.total.shape[1] > LARGE:
        modes = [mode for mode in modes if MODES[mode] != "place"]
    with parts.card(st, "placement-2", "All experts"):
        mode = (
            st.radio("Colour of a square", modes, horizontal=True, key="colour")
            if len(modes) > 1
            else modes[0]
        )
        if MODES[mode] == "place":
            parts.placement_key()
        elif MODES[mode] == "hit share":
            st.caption("Stronger green: larger share of hits. Grey: unused.")
        else:
            st.caption(
                f"Stronger colour: more uses, on a logarithmic scale; strongest = {int(grid.total.max()):,} uses."
            )
        if MODES[mode] == "uses":
            ranked = st.toggle("Most used experts first", value=False, key="ranked-uses")
            depth = experts.depth_of(grid.total)
            shown = experts.by_rank(depth, grid.total) if ranked else depth
            figure = experts.experts_map(np.asarray(shown, np.uint8), scale="uses", ranked=ranked)
        elif grid.total.shape[1] > LARGE:
            share = experts.depth_of_share(grid.hit_share)
            figure = experts.experts_map(share, scale="hits", ranked=False)
        else:
            figure = base.placement_grid(grid, colour_by=MODES[mode])
        parts.chart(
            figure,
            key="grid",
            alt=f"Heatmap of MoE layers and experts, by {mode.lower()}",
            advice="A row that differs from its neighbours is a layer with too few slots, or with uneven routing."
            if view.run.has_slots
            else "A few strong columns in each row: a GPU with few slots would already catch most uses.",
        )
        layer = 0
        if len(grid.total) > 1:
            links.adopt("layer", "one-layer", range(len(grid.total)), instead="layer 0 is shown")
            layer = st.slider("One layer, expert by expert", 0, len(grid.total) - 1, key="one-layer")
            links.publish("layer", layer, 0)
        parts.chart(
            experts.one_layer(grid.total[layer], None),
            key="layer",
            alt=f"Experts of layer {layer}, coloured by uses",
            advice="Empty squares are experts that no token chose in this window: they need no slot.",
        )


def _popularity(grid: queries.PlacementGrid) -> None:
    with parts.card(st, "placement-4", "Popularity: how uneven is the routing?"):
        parts.chart(
            experts.popularity(grid.total),
            key="popularity",
            alt="Cumulative share of uses by the most used experts, band over layers",
            advice="High above the dotted line: a small cache or a static placement works. Near it: only more slots "
            "help.",
        )


frame.live_page(
    "Placement",
    "Each token is routed to a few experts in every MoE layer: which are on the GPU, and on which device did they run?",
    body,
)
