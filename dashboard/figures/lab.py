"""Figures of predicted machines. See `base`."""

from __future__ import annotations

from collections.abc import Sequence

from twofold.tools.lab import recorded_run

from dashboard.figures.base import layout
from dashboard.figures.chart import Chart
from dashboard.palette import FAILED, HIT, QUANTITY

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


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


def capacity(results: Sequence[recorded_run.MachineResult], *, target: float) -> Chart:
    """Predicted tokens/s by VRAM, a line per machine, and the wanted speed."""
    figure = Chart()
    for number, machine in enumerate(dict.fromkeys(each.machine for each in results)):
        own = [each for each in results if each.machine == machine]
        figure.add_scatter(
            x=[each.vram_gb for each in own],
            y=[each.tokens_per_s for each in own],
            customdata=[(each.slot_share * 100, each.hit_rate * 100) for each in own],
            name=machine,
            mode="lines+markers",
            line={"width": 2, "dash": _DASHES[number % len(_DASHES)], "color": QUANTITY},
            marker={"size": 9, "color": [HIT if each.tokens_per_s >= target else QUANTITY for each in own]},
            hovertemplate="%{x:g} GB: %{y:,.1f} tokens/s, %{customdata[0]:.0f} % in slots, "
            "%{customdata[1]:.0f} % hits<extra>" + machine + "</extra>",
        )
    figure.add_hline(y=target, line={"color": FAILED, "width": 2, "dash": "dot"})
    figure = layout(figure, height=340, legend=True)
    figure.update_xaxes(title="VRAM, GB", type="log", tickvals=[8, 12, 16, 24, 32, 48, 80, 141])
    figure.update_yaxes(title="tokens/s, predicted", rangemode="tozero")
    return figure
