"""Figures of predicted machines. See `base`."""

from __future__ import annotations

from collections.abc import Sequence

from twofold.tools.lab import recorded_run

from dashboard.figures.base import layout
from dashboard.figures.chart import Chart
from dashboard.palette import FAILED, HIT, QUANTITY


def speeds(results: Sequence[recorded_run.MachineResult]) -> Chart:
    """Predicted tokens/s by machine, with hit rate and busy share of the link."""
    figure = Chart()
    figure.add_bar(
        x=[each.tokens_per_s for each in results],
        y=[each.machine for each in results],
        orientation="h",
        marker={"color": QUANTITY},
        text=[
            f"{each.tokens_per_s:,.1f} tokens/s · {each.hit_rate:.0%} hits · link {each.link_busy:.0%} busy"
            for each in results
        ],
        textposition="auto",
        hovertemplate="%{y}: %{x:,.1f} tokens/s (predicted)<extra></extra>",
    )
    figure = layout(figure, height=80 + 48 * len(results))
    figure.update_xaxes(title="tokens/s, predicted", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def cards(results: Sequence[recorded_run.MachineResult], *, target: float) -> Chart:
    """Predicted tokens/s by card, smallest memory first, and the wanted speed; cards that reach it are green."""
    figure = speeds(results)
    colors = [HIT if each.tokens_per_s >= target else QUANTITY for each in results]
    figure.update_traces(marker={"color": colors})
    figure.add_vline(x=target, line={"color": FAILED, "width": 2, "dash": "dot"}, text="wanted")
    return figure
