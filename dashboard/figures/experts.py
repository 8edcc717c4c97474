"""Figures of all experts at once, legible up to 512 experts in 60 layers. See `base`."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dashboard.figures.base import layout, packed
from dashboard.figures.chart import Chart
from dashboard.palette import AMOUNT, DEVICES, HIT, UNUSED, depths

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

_DEPTHS: Final = 250
DEVICE_COLOR_NAMES: Final = ("green", "blue", "orange", "pink", "light blue", "red", "violet", "grey")
"""Names of the colours of DEVICES."""


def by_rank(values: npt.NDArray[np.generic], uses: I64) -> npt.NDArray[np.generic]:
    """Each layer's values from its most to its least used expert; [layers, experts]."""
    order = np.argsort(-uses, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1)


def depth_of(uses: I64) -> U8:
    """Uses on a logarithmic scale of 1 to 250, 0 where unused: a byte per square."""
    most = max(1, int(uses.max(initial=0)))
    scaled = 1 + np.log1p(uses) / math.log1p(most) * (_DEPTHS - 1)
    return np.where(uses > 0, scaled, 0).astype(np.uint8)


def depth_of_share(share: npt.NDArray[np.float64]) -> U8:
    """Shares of 0 to 1 on a scale of 1 to 250, 0 where NaN."""
    return np.where(np.isnan(share), 0, 1 + np.nan_to_num(share) * (_DEPTHS - 1)).astype(np.uint8)


def experts_map(depth: U8, *, scale: str, ranked: bool, num_devices: int = 1) -> Chart:
    """Layer × expert as one square each; `scale` is "uses", "hits" (of `depth_of_share`) or "resident" (0, or 1 + the
    device's number)."""
    layers, experts = depth.shape
    colors: list[list[object]] = [[0, UNUSED]]
    colors += [[(n + 1) / num_devices, color] for n, color in enumerate(DEVICES[:num_devices])]
    if scale != "resident":
        (_, least), (_, most) = depths(HIT if scale == "hits" else AMOUNT)
        colors = [[0, UNUSED], [0.004, least], [1, most]]
    gap = 1 if experts <= 128 and layers <= 64 else 0
    figure = Chart()
    figure.add_heatmap(
        z=depth,
        colorscale=colors,
        zmin=0,
        zmax=num_devices if scale == "resident" else _DEPTHS,
        showscale=False,
        xgap=gap,
        ygap=1,
        hovertemplate="layer %{y}, " + ("rank %{x}" if ranked else "expert %{x}") + "<extra></extra>",
    )
    figure = layout(figure, height=90 + layers * (30 if layers <= 12 else max(9, 560 // layers)))
    step = next(size for size in (4, 8, 16, 32, 64, 128) if experts / size <= 16 or size == 128)
    figure.update_xaxes(title="expert, most used first" if ranked else "expert", showgrid=False, dtick=step)
    figure.update_yaxes(
        title="MoE layer", autorange="reversed", showgrid=False, dtick=1 if layers <= 16 else 4
    )
    return figure


def one_layer(uses: I64, resident: U8 | None) -> Chart:
    """The experts of one layer as large numbered squares, at most 32 a row; the number of uses, a ring if resident."""
    experts = len(uses)
    width = min(32, max(16, 2 ** math.ceil(math.log2(math.sqrt(2 * max(1, experts))))))
    rows = -(-experts // width)
    padded = np.full(rows * width, -1, np.int64)
    padded[:experts] = uses
    depth = depth_of(np.maximum(padded, 0)).reshape(rows, width)
    number = np.arange(rows * width).reshape(rows, width)
    figure = Chart()
    figure.add_heatmap(
        z=depth,
        customdata=np.stack([number, padded.reshape(rows, width)], axis=2),
        colorscale=[[0, UNUSED], [0.004, depths(AMOUNT)[0][1]], [1, depths(AMOUNT)[1][1]]],
        zmin=0,
        zmax=_DEPTHS,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate="expert %{customdata[0]}: %{customdata[1]:,} uses<extra></extra>",
    )
    if resident is not None:
        there = np.flatnonzero(resident)
        figure.add_scatter(
            x=there % width,
            y=there // width,
            mode="markers",
            marker={"symbol": "circle", "size": 9, "color": HIT, "line": {"width": 1, "color": "white"}},
            hoverinfo="skip",
        )
    figure = layout(figure, height=70 + 28 * rows)
    figure.update_xaxes(title="expert number within its row", showgrid=False, dtick=4)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        tickvals=np.arange(rows),
        ticktext=[f"{row * width}" for row in range(rows)],
    )
    return figure


def popularity(uses: I64) -> Chart:
    """Share of each layer's uses that its most used experts have: one band over the layers, against even use."""
    shares = np.cumsum(by_rank(uses, uses), axis=1) / np.maximum(uses.sum(axis=1, keepdims=True), 1) * 100
    used = shares[uses.sum(axis=1) > 0]
    experts = uses.shape[1]
    top = {"x0": 100 / experts, "dx": 100 / experts}
    figure = Chart()
    if len(used):
        low, middle, high = np.percentile(used, (0, 50, 100), axis=0)
        figure.add_scatter(
            **top, y=packed(high), mode="lines", line={"width": 0}, hoverinfo="skip", showlegend=False
        )
        figure.add_scatter(
            **top,
            y=packed(low),
            mode="lines",
            line={"width": 0},
            fill="tonexty",
            fillcolor=depths(AMOUNT)[0][1],
            name="all layers",
            hoverinfo="skip",
        )
        figure.add_scatter(
            **top,
            y=packed(middle),
            mode="lines",
            line={"color": AMOUNT, "width": 2.5},
            name="median layer",
            hovertemplate="%{x:.0f} % of the experts have %{y:.0f} % of the uses<extra></extra>",
        )
    figure.add_scatter(
        x=[0, 100],
        y=[0, 100],
        mode="lines",
        line={"dash": "dot", "width": 1.5, "color": "#7a8aa0"},
        name="even use",
    )
    figure = layout(figure, height=260, legend=True)
    figure.update_xaxes(title="% of a layer's experts, most used first", range=[0, 100])
    figure.update_yaxes(title="% of its uses", range=[0, 100])
    return figure
