"""Figures of speed and of where time goes. See `base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import F64, layout, over_time, packed, spaced, stacked
from dashboard.figures.chart import Chart
from dashboard.palette import PART_COLORS, QUANTITY, faint

PART_NAMES: Final[dict[str, str]] = {
    "schedule": "scheduling",
    "embed": "embedding",
    "attention": "attention",
    "router": "routers",
    "dense_ffn": "dense feed-forward layers",
    "experts_cpu": "experts on the CPU",
    "experts_gpu": "experts on the GPU",
    "head": "head",
    "batch": "batch assembly",
    "sampling": "sampling",
    "emit": "detokenising and sending",
    "telemetry": "telemetry",
    "rest": "rest",
    "dense": "embedding, attention, routers",
    "link": "waiting for the link",
}
_MAX_PARTS: Final = 5
"""Parts with a colour of their own; smaller ones are summed."""


def speed(at_s: F64, decode: F64, prefill: F64) -> Chart:
    """Decode and prompt tokens per second over time."""
    figure = Chart()
    for name, values, dash in (("decode", decode, "solid"), ("prompt", prefill, "dot")):
        figure.add_scatter(
            **spaced(at_s),
            y=packed(values),
            name=f"{name} tokens/s",
            mode="lines",
            line={"color": QUANTITY, "width": 2, "shape": "hv", "dash": dash},
            fill="tozeroy" if name == "decode" else None,
            fillcolor=faint(QUANTITY, 0.16),
            hovertemplate="%{y:,.1f}",
        )
    return over_time(figure, at_s)


def parts(at_s: F64, seconds: Mapping[str, F64], *, bucket_s: float) -> Chart:
    """Shares of the steps' wall time by part, largest first, stacked to 100 %; a bucket without steps is empty."""
    names = list(seconds)
    shown = {name: seconds[name] for name in names[:_MAX_PARTS]}
    if len(names) > _MAX_PARTS:
        shown["other"] = np.sum([seconds[name] for name in names[_MAX_PARTS:]], axis=0)
    total = np.sum(list(shown.values()), axis=0) if shown else np.zeros(len(at_s))
    rows = {}
    for name, values in shown.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(total > 0, values / total * 100.0, np.nan)
        rows[PART_NAMES.get(name, name)] = (share, PART_COLORS.get(name, QUANTITY))
    return stacked(at_s, rows, bucket_s=bucket_s, height=260)


def waterfall(parts: Sequence[queries.Part]) -> Chart:
    """The parts of a request's time, one below the other, each where it began; milliseconds."""
    figure = Chart()
    figure.add_bar(
        y=[part.name for part in parts],
        x=[part.duration_s * 1e3 for part in parts],
        base=[part.begin_s * 1e3 for part in parts],
        orientation="h",
        marker={"color": QUANTITY},
        text=[f"{part.duration_s * 1e3:,.1f} ms" for part in parts],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:,.2f} ms<extra></extra>",
    )
    figure = layout(figure, height=70 + 30 * max(2, len(parts)))
    end_ms = max((part.begin_s + part.duration_s for part in parts), default=0.0) * 1e3
    figure.update_xaxes(title="ms since the request began, wall clock", range=[0, end_ms * 1.15 + 1e-6])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
