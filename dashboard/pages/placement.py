"""Expert placement: layer × expert, by where each expert ran."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts, placement_sweep
from dashboard.figures import base
from dashboard.view import View

MODES = {
    "Where it ran most": "place",
    "Share of hits": "hit share",
    "How often used": "uses",
}


def body(view: View) -> None:
    grid, span = view.placements()
    total = int(grid.total.sum())
    stretch = f"{formats.moment(span.begin_s)} to {formats.moment(span.end_s)}"
    if not total:
        st.info(
            f"No expert was used from {stretch}. Send a request, or choose a longer window in the sidebar.",
            icon=":material/hourglass_empty:",
        )
        placement_sweep.card()
        return
    counts = {place: grid.by_placement(place) for place in queries.Placement}
    used = int((grid.total > 0).sum())
    with parts.card(st, "placement-1"):
        st.markdown(f"**{total:,} uses of experts** from {stretch}")
        parts.chart(
            base.share_bar(counts),
            key="share",
            alt="Uses of experts by where they ran",
            advice="Mostly blue: more slots with --gpu-experts-ratio. Much orange: the link is the limit.",
        )
        hits, fetched, cpu, experts = st.columns(4)
        hits.metric("On GPU, hit", formats.percent(counts[queries.Placement.HIT] / total))
        fetched.metric("On GPU, fetched", formats.percent(counts[queries.Placement.FETCHED] / total))
        cpu.metric("On CPU", formats.percent(counts[queries.Placement.CPU] / total))
        experts.metric("Experts used", f"{used:,} of {grid.total.size:,}")
    with parts.card(st, "placement-2"):
        mode = st.radio("Colour of a square", list(MODES), horizontal=True, key="colour")
        if MODES[mode] == "place":
            parts.placement_key()
        elif MODES[mode] == "hit share":
            st.caption("Darker green: larger share of hits. Empty: unused.")
        else:
            most = int(grid.total.max())
            st.caption(f"Darker colour: more uses; darkest = {most:,} uses.")
        parts.chart(
            base.placement_grid(grid, colour_by=MODES[mode]),
            key="grid",
            alt="Heatmap of MoE layers and experts, coloured by where each expert ran",
            advice="A blue row among green rows is a layer with too few slots: compare policies on a recorded trace.",
        )
        st.caption(
            "One square is one expert of one layer; hover over it for its counts. "
            "The bars on the right show the shares of each layer."
        )
    placement_sweep.card()


frame.live_page(
    "Expert placement",
    "Each token is routed to a few experts in every MoE layer: on which device did they run?",
    body,
)
