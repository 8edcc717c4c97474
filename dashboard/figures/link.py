"""Figures of the link between host and device. See `base`."""

from __future__ import annotations

from typing import Final

import numpy as np
from twofold.telemetry import queries
from twofold.telemetry.queries import CopyRows, LinkCeiling, LinkSeries, ReasonTotals, UploadReason

from dashboard.figures.base import MAX_POINTS, layout, moments, over_time
from dashboard.figures.chart import Chart
from dashboard.palette import FAILED, QUANTITY, REASON_COLORS, faint

REASON_NAMES: Final = {
    UploadReason.DEMAND: "demand",
    UploadReason.ADMISSION: "admission",
    UploadReason.PREFETCH: "prefetch",
}
_LANES: Final = ("demand lane", "background lane")


def rates(series: LinkSeries, *, ceiling: float | None, alone: float | None) -> Chart:
    """GB/s copied by reason, and lines in bytes per second: the ceiling of copies back to back, and the rate of copies
    that run alone."""
    figure = Chart()
    at = moments(series.at_s)
    for reason, color in REASON_COLORS.items():
        values = series.bytes_per_clock_s[reason] / 1e9
        if not np.nansum(values):
            continue
        figure.add_scatter(
            x=at,
            y=values,
            name=REASON_NAMES[reason],
            mode="lines",
            line={"width": 0.5, "color": color, "shape": "hv"},
            fillcolor=faint(color, 0.75),
            stackgroup="reasons",
            hovertemplate="%{y:.2f} GB/s",
        )
    lines = (
        ("ceiling, copies back to back", ceiling, "solid"),
        ("one copy alone, no ceiling", alone, "dot"),
    )
    for name, value, dash in lines:
        if value is not None and len(at):
            figure.add_scatter(
                x=[at[0], at[-1]],
                y=[value / 1e9] * 2,
                name=name,
                mode="lines",
                line={"color": FAILED, "width": 2, "dash": dash},
                hovertemplate="%{y:.2f} GB/s",
            )
    figure.update_yaxes(title="GB/s")
    return over_time(figure, series.at_s, height=300)


def busy(series: LinkSeries) -> Chart:
    """Share of the steps' time in which the link copied, percent."""
    figure = Chart()
    figure.add_scatter(
        x=moments(series.at_s),
        y=series.busy_share * 100,
        mode="lines",
        line={"color": QUANTITY, "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor=faint(QUANTITY, 0.16),
        hovertemplate="%{y:.0f} % busy<extra></extra>",
    )
    figure.update_yaxes(title="% busy", range=[0, 100], dtick=25)
    return over_time(figure, series.at_s, height=220, legend=False)


def size_curve(ceiling: LinkCeiling, totals: list[ReasonTotals]) -> Chart:
    """Rate of a copy alone by its size, log-log, and what the copies of each reason reached."""
    found = [total for total in totals if total.num_copies and total.copying_us > 0]
    sizes = np.geomspace(1e4, 1e8, 60)
    figure = Chart()
    figure.add_scatter(
        x=sizes / 1e6,
        y=ceiling.bytes_per_s(sizes) / 1e9,
        name="one copy alone, calibrated",
        mode="lines",
        line={"color": FAILED, "width": 2},
        hovertemplate="%{x:.3f} MB: alone at most %{y:.2f} GB/s<extra></extra>",
    )
    for total in found:
        figure.add_scatter(
            x=[total.median_bytes / 1e6],
            y=[total.bytes_per_s / 1e9],
            name=REASON_NAMES[total.reason],
            mode="markers",
            marker={"size": 13, "color": REASON_COLORS[total.reason], "line": {"width": 1, "color": "white"}},
            hovertemplate=f"{REASON_NAMES[total.reason]}: %{{x:.3f}} MB at %{{y:.2f}} GB/s<extra></extra>",
        )
    figure = layout(figure, height=300, legend=True)
    figure.update_xaxes(type="log", title="copy size, MB", tickvals=[0.01, 0.1, 1, 10, 100])
    figure.update_yaxes(type="log", title="GB/s", tickvals=[0.1, 0.3, 1, 3, 10, 30])
    return figure


def sizes(copies: CopyRows) -> Chart:
    """Number of copies by size, in powers of two, by reason."""
    figure = Chart()
    if len(copies):
        power = np.floor(np.log2(np.maximum(copies.size_bytes, 1))).astype(np.int64)
        low = int(power.min())
        labels = [_size_name(2.0**p) for p in range(low, int(power.max()) + 1)]
        for reason, color in REASON_COLORS.items():
            own = power[copies.reason == reason] - low
            if len(own):
                figure.add_bar(
                    x=labels,
                    y=np.bincount(own, minlength=len(labels)),
                    name=REASON_NAMES[reason],
                    marker={"color": color},
                    hovertemplate="%{y:,} copies of %{x} and more",
                )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure = layout(figure, height=300, legend=True)
    figure.update_xaxes(title="size, from this one up to its double", type="category")
    figure.update_yaxes(title="copies")
    return figure


def _size_name(size: float) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def lanes(copies: CopyRows) -> Chart:
    """Copies on the link's two lanes over milliseconds of the run's clock since the first one was queued."""
    shown = copies.where(np.arange(len(copies)) >= len(copies) - MAX_POINTS // 3)
    origin_us = float(shown.begin_us.min()) if len(shown) else 0.0
    figure = Chart()
    for reason, color in REASON_COLORS.items():
        own = shown.where(shown.reason == reason)
        if not len(own):
            continue
        figure.add_bar(
            y=own.lane,
            base=(own.begin_us - origin_us) / 1e3,
            x=own.copying_us / 1e3,
            width=np.full(len(own), 0.6),
            orientation="h",
            name=REASON_NAMES[reason],
            customdata=np.stack([own.layer, own.expert, own.waiting_us], axis=1),
            marker={"color": color, "line": {"width": 0}},
            hovertemplate=(
                "layer %{customdata[0]:.0f}, expert %{customdata[1]:.0f}: %{x:.3f} ms, "
                "waited %{customdata[2]:.0f} µs<extra>" + REASON_NAMES[reason] + "</extra>"
            ),
        )
    figure.update_layout(barmode="overlay")
    figure = layout(figure, height=190, legend=True)
    figure.update_xaxes(title="ms", rangemode="tozero")
    figure.update_yaxes(tickvals=[0, 1], ticktext=list(_LANES), range=[1.5, -0.5], showgrid=False)
    return figure


def latest(copies: CopyRows, *, num_steps: int) -> CopyRows:
    """Copies of the last `num_steps` steps that copied anything."""
    found = np.unique(copies.step)
    return copies if not len(found) else copies.where(copies.step >= found[-min(num_steps, len(found))])


def unused_share(paybacks: queries.Paybacks, reason: UploadReason) -> float | None:
    """Share of the uploads of a reason that lost their slot before any use; None without uploads."""
    total = int((paybacks.copies.reason == reason).sum())
    return paybacks.count(reason, queries.UploadOutcome.WASTED) / total if total else None
