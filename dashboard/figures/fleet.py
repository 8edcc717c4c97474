"""Figures of a fleet's replicas. See `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from twofold.telemetry import queries

from dashboard.figures.base import layout
from dashboard.figures.chart import Chart
from dashboard.palette import AMOUNT, FAILED, HIT

REASONS: Final[tuple[queries.RoutedBy, ...]] = ("prefix", "load", "retry")
_COLORS: Final[dict[queries.RoutedBy, str]] = {"prefix": HIT, "load": AMOUNT, "retry": FAILED}


def decisions(replicas: Sequence[queries.FleetReplica]) -> Chart:
    """Requests by replica, stacked by the reason of the router's choice."""
    names = [each.run.replica or each.run.host for each in replicas]
    figure = Chart()
    for reason in REASONS:
        counts = [each.decided.get(reason, queries.Decided()) for each in replicas]
        figure.add_bar(
            x=[each.num_requests for each in counts],
            y=names,
            orientation="h",
            name={"prefix": "cached prefix", "load": "load", "retry": "retry"}[reason],
            marker={"color": _COLORS[reason]},
            customdata=[each.cached_tokens / max(1, each.prompt_tokens) * 100 for each in counts],
            hovertemplate="%{x:,} requests, %{customdata:.1f} % of prompt tokens cached",
        )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure = layout(figure, height=80 + 36 * len(names), legend=True)
    figure.update_xaxes(title="requests", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
