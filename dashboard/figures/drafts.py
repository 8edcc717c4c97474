"""Figures of speculative decoding. See `base`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import layout, moments
from dashboard.figures.chart import Chart
from dashboard.palette import AMOUNT, QUANTITY

_BUCKETS = 200


def acceptance(found: Sequence[tuple[int, int]]) -> Chart:
    """Share of drafted tokens accepted, by position in the draft, where those before were accepted."""
    position = np.arange(1, len(found) + 1)
    share = [accepted / max(1, tried) * 100 for accepted, tried in found]
    figure = Chart()
    figure.add_bar(
        x=position,
        y=share,
        marker={"color": QUANTITY},
        customdata=[tried for _, tried in found],
        text=[f"{value:.0f} %" for value in share],
        hovertemplate="position %{x}: %{y:.1f} % of %{customdata:,}<extra></extra>",
    )
    figure = layout(figure, height=260)
    figure.update_xaxes(title="position in the draft", dtick=1)
    figure.update_yaxes(title="accepted, %", range=[0, 105])
    return figure


def depths_over_time(steps: queries.DraftSteps) -> Chart:
    """Drafted tokens and yielded tokens per sequence and step over time, means of equal numbers of steps."""
    groups = [group for group in np.array_split(np.arange(len(steps)), _BUCKETS) if len(group)]
    at = moments(np.array([steps.started_s[group[0]] for group in groups]))
    figure = Chart()
    for name, values, color in (("drafted", steps.depth, AMOUNT), ("yielded", steps.yielded, QUANTITY)):
        figure.add_scatter(
            x=at,
            y=[float(values[group].mean()) for group in groups],
            name=f"tokens {name} per step",
            mode="lines",
            line={"color": color, "width": 2, "shape": "hv" if name == "drafted" else "linear"},
            hovertemplate="%{y:.2f}",
        )
    figure = layout(figure, height=260, legend=True)
    figure.update_yaxes(title="tokens per sequence and step", rangemode="tozero")
    return figure
