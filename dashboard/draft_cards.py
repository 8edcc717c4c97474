"""Speculative decoding on the Scheduler page: acceptance, depths, and predicted against measured steps."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries

from dashboard import parts
from dashboard.figures import drafts, scheduler
from dashboard.view import View


def cards(view: View) -> None:
    """Draw nothing where the run verified no drafts."""
    drafted, _ = view.query(queries.speculation)
    if not drafted:
        return
    found = view.query(queries.draft_acceptance)
    steps = view.query(queries.draft_steps, view.span)
    left, right = st.columns(2)
    with parts.card(left, "drafts-1", "Accepted drafts by position"):
        if found:
            parts.chart(
                drafts.acceptance(found),
                key="draft-acceptance",
                alt="Share of drafted tokens accepted, by position in the draft",
                advice="A low first bar: try another drafter. Bars that fall quickly: deep drafts cannot pay.",
                note=f"{found[0][1]:,} drafts of the whole run, in steps of one sequence.",
            )
        else:
            parts.note(
                "Every step with drafts had several sequences, whose positions are not recorded apart."
            )
    with parts.card(right, "drafts-2", "Chosen depth over time"):
        if len(steps):
            parts.chart(
                drafts.depths_over_time(steps),
                key="draft-depths",
                alt="Tokens drafted and tokens yielded per sequence and step over time",
                advice="Depth 0 for long: drafts cost more than they yield here. A smaller model or fewer misses help.",
            )
        else:
            parts.note("No decode step is in this window.")
    _prices(view, steps)


def _prices(view: View, steps: queries.DraftSteps) -> None:
    priced = steps.predicted_us > 0
    if not priced.any():
        return
    ratio = steps.step_us[priced] / steps.predicted_us[priced]
    middle = sorted(ratio.tolist())[len(ratio) // 2]
    with parts.card(st, "drafts-3", f"Predicted against measured steps with drafts{view.emulated}"):
        parts.chart(
            scheduler.estimated_measured(steps.predicted_us[priced], steps.step_us[priced]),
            key="draft-prices",
            alt="Density of steps with drafts by predicted and measured time",
            advice="A cloud above the diagonal: drafts are dearer than their price, and depths are too large.",
            note=f"{int(priced.sum()):,} steps; measured / predicted has the median {middle:.2f}.",
        )
