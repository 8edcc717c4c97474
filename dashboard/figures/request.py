"""Figures of one request: its tokens, one token's layers, and its step's uploads. See `base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from twofold.telemetry import queries

from dashboard.figures.base import F64, MAX_POINTS, layout, packed
from dashboard.figures.chart import Chart
from dashboard.figures.times import PART_NAMES
from dashboard.palette import (
    ADMISSION,
    AMOUNT,
    CPU,
    FAILED,
    FETCHED,
    HIT,
    PREFETCH,
    QUANTITY,
    REASON_COLORS,
    depths,
    faint,
)

_MAX_BARS: Final = 400
"""More tokens than this are drawn as areas: each part of a bar is an element of its own."""
_MAX_PARTS: Final = 6
_PART_COLORS: Final = {
    "experts_cpu": CPU,
    "experts_gpu": HIT,
    "link": FETCHED,
    "attention": PREFETCH,
    "dense": PREFETCH,
    "head": ADMISSION,
    "emit": AMOUNT,
    "schedule": FAILED,
}


def token_times(
    position: npt.NDArray[np.int64],
    parts_us: Mapping[str, F64],
    misses: npt.NDArray[np.int64],
    chosen: int,
    *,
    unit: str,
) -> Chart:
    """Step time of each token as a bar of its parts, the largest ones at the bottom.

    parts_us: [tokens] by part, those with most time first. chosen: index of the explained token.
    """
    figure = Chart()
    shown = dict(list(parts_us.items())[:_MAX_PARTS])
    if others := list(parts_us.values())[_MAX_PARTS:]:
        shown["other"] = np.sum(others, axis=0)
    step_us = np.sum(list(shown.values()), axis=0)
    depth = iter((0.75, 0.55, 0.4, 0.3, 0.22, 0.15, 0.1))
    for number, (name, values) in enumerate(shown.items()):
        color = _PART_COLORS.get(name) or faint(QUANTITY, next(depth))
        common = {
            "x": position,
            "y": packed(values / 1e3),
            "name": PART_NAMES.get(name, name),
            "customdata": misses if number == 0 else None,
            "hovertemplate": "%{y:.2f} " + unit + (", %{customdata} misses" if number == 0 else ""),
        }
        if len(position) <= _MAX_BARS:
            figure.add_bar(**common, marker={"color": color, "line": {"width": 0}})
        else:
            line = {"width": 0, "shape": "hvh", "color": color}
            figure.add_scatter(**common, mode="lines", line=line, fillcolor=color, stackgroup="parts")
    figure.update_layout(barmode="stack", hovermode="x unified")
    figure.update_layout(bargap=0.15)
    figure = layout(figure, height=280, legend=True)
    figure.update_xaxes(title="token position (prompt first)", showgrid=False)
    figure.update_yaxes(title=unit, rangemode="tozero")
    if len(position):
        figure.add_annotation(
            x=int(position[chosen]),
            y=float(np.nan_to_num(step_us[chosen]) / 1e3),
            text="explained below",
            showarrow=True,
            arrowhead=2,
            arrowcolor=QUANTITY,
            ay=-22,
            ax=0,
            font={"size": 12},
        )
        figure.update_yaxes(range=[0, float(np.nanmax(step_us, initial=0.001)) / 1e3 * 1.22])
    return figure


def token_layer_misses(position: npt.NDArray[np.int64], num_by_placement: npt.NDArray[np.int64]) -> Chart:
    """Token × layer heatmap: routed experts that were not on the GPU when needed."""
    misses = num_by_placement[:, :, [queries.Placement.CPU, queries.Placement.FETCHED]].sum(axis=2)
    routed = int(num_by_placement.sum(axis=2).max(initial=1))
    figure = Chart()
    figure.add_heatmap(
        x=position,
        z=misses.T.astype(np.uint8),
        customdata=num_by_placement.transpose(1, 0, 2).astype(np.uint8),
        colorscale=depths(AMOUNT),
        zmin=0,
        zmax=max(1, routed),
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "misses"}, "thickness": 10, "outlinewidth": 0, "dtick": 1},
        hovertemplate=(
            "position %{x}, layer %{y}<br>%{customdata[0]} hits, %{customdata[2]} fetched, "
            "%{customdata[1]} on CPU<extra></extra>"
        ),
    )
    figure = layout(figure, height=26 * max(4, misses.shape[1]) + 70 if misses.shape[1] <= 12 else 420)
    figure.update_yaxes(title="MoE layer", autorange="reversed", showgrid=False)
    figure.update_xaxes(title="token position (prompt first)", showgrid=False)
    return figure


def layer_times(layer_us: F64, cpu_us: F64, gpu_us: F64, predicted_us: F64 | None) -> Chart:
    """One token's time per layer: CPU and GPU side by side, the measured and the predicted layer time.

    `predicted_us` is None on a virtual clock, where a layer takes exactly the predicted time.
    """
    layers = np.arange(len(layer_us))
    figure = Chart()
    figure.add_bar(x=layers, y=cpu_us, name="CPU part", marker={"color": CPU})
    hatched = {"color": QUANTITY, "pattern": {"shape": "/", "solidity": 0.35, "fillmode": "overlay"}}
    figure.add_bar(x=layers, y=gpu_us, name="GPU part", marker=hatched)
    marks = [("layer", layer_us, "line-ew-open", 22)]
    if predicted_us is not None:
        marks.append(("predicted", predicted_us, "diamond-open", 12))
    for name, values, symbol, size in marks:
        figure.add_scatter(
            x=layers,
            y=values,
            name=name,
            mode="markers",
            marker={
                "symbol": symbol,
                "size": size,
                "color": QUANTITY,
                "line": {"width": 2, "color": QUANTITY},
            },
        )
    figure.update_traces(hovertemplate="%{y:.1f} µs")
    figure.update_layout(barmode="group", bargap=0.35, hovermode="x unified")
    figure = layout(figure, height=270, legend=True)
    figure.update_xaxes(title="MoE layer", dtick=1 if len(layers) <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="µs", rangemode="tozero")
    return figure


def _rows(uploads: Sequence[queries.Upload]) -> list[int]:
    """A row for each copy, as few rows as possible without overlap. The link carries one copy at a time, but a database
    may hold copies of several links or concurrent copies of one device."""
    free_us: list[float] = []
    rows = [0] * len(uploads)
    for index in sorted(range(len(uploads)), key=lambda index: uploads[index].begin_us):
        upload = uploads[index]
        row = next((row for row, free in enumerate(free_us) if free <= upload.begin_us + 1e-6), len(free_us))
        if row == len(free_us):
            free_us.append(0.0)
        free_us[row] = upload.end_us
        rows[index] = row
    return rows


def upload_timeline(uploads: Sequence[queries.Upload]) -> Chart:
    """A step's uploads on the link, in milliseconds since the first was queued; each reason has separate rows."""
    uploads = uploads[:MAX_POINTS]
    origin_us = min((upload.queued_us for upload in uploads), default=0.0)
    figure = Chart()
    names: list[str] = []
    for reason, color in REASON_COLORS.items():
        mine = [upload for upload in uploads if upload.reason is reason]
        if not mine:
            continue
        rows = np.array(_rows(mine))
        begin_ms, end_ms, queued_ms = (
            (np.array([getattr(upload, name) for upload in mine]) - origin_us) / 1e3
            for name in ("begin_us", "end_us", "queued_us")
        )
        figure.add_bar(
            y=len(names) + rows,
            base=begin_ms,
            x=end_ms - begin_ms,
            # Set explicitly: Plotly's default bar height is the least distance between rows of its trace.
            width=np.full(len(mine), 0.7),
            orientation="h",
            name=reason.name.lower(),
            customdata=np.array(
                [
                    (upload.layer, upload.expert, wait)
                    for upload, wait in zip(mine, begin_ms - queued_ms, strict=True)
                ]
            ),
            marker={"color": color, "line": {"width": 0}},
            hovertemplate=(
                "layer %{customdata[0]}, expert %{customdata[1]}: %{x:.3f} ms, "
                "waited %{customdata[2]:.3f} ms<extra>" + reason.name.lower() + "</extra>"
            ),
        )
        names += [reason.name.lower(), *[""] * int(rows.max())]
    figure.update_layout(barmode="overlay")
    figure = layout(figure, height=90 + 44 * max(1, len(names)))
    figure.update_xaxes(title="ms since the step's first upload was queued", rangemode="tozero")
    figure.update_yaxes(
        tickvals=np.arange(len(names)), ticktext=names, range=[len(names) - 0.5, -0.5], showgrid=False
    )
    return figure
