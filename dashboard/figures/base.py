"""Plotly figures of query results. No Streamlit, no database: arrays in, a figure out.

Colours come from `palette`; text, grid and font are left to Streamlit's theme, light or dark. Arrays stay NumPy,
heatmaps uint8: Plotly then sends them packed. A trace has at most MAX_POINTS points.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from twofold.telemetry import queries

from dashboard.figures.chart import Chart
from dashboard.palette import (
    AMOUNT,
    FAILED,
    HIT,
    PLACEMENT_COLORS,
    QUANTITY,
    UNUSED,
    depths,
    faint,
    text_on,
)

F64 = npt.NDArray[np.float64]

MAX_POINTS: Final = 5000
PLACEMENT_NAMES = {
    queries.Placement.HIT: "on GPU (cache hit)",
    queries.Placement.FETCHED: "on GPU, fetched on demand",
    queries.Placement.CPU: "on CPU",
}
SHORT_NAMES = {
    queries.Placement.HIT: "GPU, hit",
    queries.Placement.FETCHED: "GPU, fetched",
    queries.Placement.CPU: "CPU",
}
STACK_ORDER = (queries.Placement.HIT, queries.Placement.FETCHED, queries.Placement.CPU)

TRANSPARENT = "rgba(0,0,0,0)"


def layout(figure: Chart, *, height: int, legend: bool = False) -> Chart:
    """Apply the layout that all figures share; height in pixels."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 12, "t": 30 if legend else 10, "b": 8},
        paper_bgcolor=TRANSPARENT,
        plot_bgcolor=TRANSPARENT,
        font={"size": 13},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )
    # "allow" spares the browser the size of each tick label: 0.6 s of a page's first drawing.
    figure.update_xaxes(zeroline=False, automargin=True, ticklabeloverflow="allow")
    figure.update_yaxes(zeroline=False, automargin=True, ticklabeloverflow="allow")
    return figure


def moments(at_s: F64) -> F64:
    """Unix seconds as milliseconds of this machine's local time, which a date axis shows; packed on the wire."""
    offset_s = time.localtime(float(at_s[0])).tm_gmtoff if len(at_s) else 0
    return (np.asarray(at_s, np.float64) + offset_s) * 1e3


def spaced(at_s: F64) -> dict[str, Any]:
    """Where a trace's values lie on a date axis: first moment and distance, which is all the wire needs if even."""
    at_ms = moments(at_s)
    distances = np.diff(at_ms)
    if not len(distances) or distances.min() != distances.max():
        return {"x": at_ms}
    return {"x0": float(at_ms[0]), "dx": float(distances[0])}


def packed(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Values with the digits that a screen can show: half the bytes on the wire."""
    return np.asarray(values, np.float32)


def over_time(figure: Chart, at_s: F64, *, height: int = 230, legend: bool = True) -> Chart:
    """The layout of a time series: values from 0, the time of day on each tick and no date.

    Room for tick labels is fixed: to measure them, the browser draws the chart twice.
    """
    spread_s = float(at_s[-1] - at_s[0]) if len(at_s) else 0.0
    figure = layout(figure, height=height, legend=legend)
    figure.covers_window = True
    figure.update_layout(hovermode="x unified", dragmode="select", selectdirection="h")
    figure.update_xaxes(type="date", tickformat="%H:%M:%S" if spread_s < 900 else "%H:%M", nticks=7)
    if not figure.has_range():
        figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(automargin=False)
    figure.update_yaxes(automargin=False)
    # On the right half of a label such as 15:59:20 has room.
    figure.update_layout(margin={"l": 64 if figure.is_titled() else 44, "r": 28, "b": 26})
    return figure


def shade_lost(figure: Chart, lost: Sequence[queries.LostSteps]) -> None:
    """Shade the stretches of a time series in which steps ran whose rows were lost."""
    for each in lost:
        begin, end = moments(np.array([each.begin_s, each.end_s])).tolist()
        figure.add_band(x0=begin, x1=end, color=faint(FAILED, 0.18))


def area(at_s: F64, values: F64, *, name: str, unit: str) -> Chart:
    """One quantity over time, each value for its whole bucket; NaN leaves a gap."""
    figure = Chart()
    # The fill is a separate trace: Plotly would fill straight across a gap of the line.
    figure.add_scatter(
        **spaced(at_s),
        y=packed(np.nan_to_num(values)),
        mode="lines",
        line={"width": 0, "shape": "hv"},
        fill="tozeroy",
        fillcolor=faint(QUANTITY, 0.16),
        hoverinfo="skip",
    )
    figure.add_scatter(
        **spaced(at_s),
        y=packed(values),
        name=name,
        mode="lines" if np.count_nonzero(~np.isnan(values)) > 2 else "lines+markers",
        line={"color": QUANTITY, "width": 2, "shape": "hv"},
        hovertemplate="%{y:,.1f} " + unit + "<extra></extra>",
    )
    return over_time(figure, at_s, legend=False)


def shares(at_s: F64, values: F64, *, bucket_s: float) -> Chart:
    """Placement of routed experts over time: `values` [3, buckets] by Placement, stacked to 100 %; NaN leaves a gap."""
    rows = {
        SHORT_NAMES[place]: (values[place] * 100.0, faint(PLACEMENT_COLORS[place], 0.8))
        for place in STACK_ORDER
    }
    return stacked(at_s, rows, bucket_s=bucket_s)


def stacked(at_s: F64, rows: Mapping[str, tuple[F64, str]], *, bucket_s: float, height: int = 230) -> Chart:
    """Percentages by name, with their colours, stacked to 100: each value for its whole bucket; NaN leaves a gap.

    Areas, not bars: a bar is an element of its own, and hundreds of them take the browser 60 ms at each refresh.
    """
    ends_s = np.append(at_s, at_s[-1:] + bucket_s)
    figure = Chart()
    for name, (values, color) in rows.items():
        figure.add_scatter(
            **spaced(ends_s),
            y=packed(np.nan_to_num(np.append(values, values[-1:]))),
            name=name,
            mode="lines",
            line={"width": 0, "shape": "hv", "color": color},
            fillcolor=color,
            stackgroup="shares",
            hovertemplate="%{y:.1f} %",
        )
    figure.update_yaxes(range=[0, 100], dtick=25)
    return over_time(figure, at_s, height=height)


def queue(at_s: F64, running: F64, waiting: F64) -> Chart:
    """Running and waiting requests over time."""
    figure = Chart()
    for name, values, dash in (("running", running, "solid"), ("waiting", waiting, "dot")):
        figure.add_scatter(
            **spaced(at_s),
            y=packed(values),
            name=name,
            mode="lines",
            line={"width": 2, "color": QUANTITY, "dash": dash},
            fill="tozeroy" if name == "running" else None,
            fillcolor=faint(QUANTITY, 0.16),
            hovertemplate="%{y:.1f}",
        )
    top = float(max(np.max(running, initial=0.0), np.max(waiting, initial=0.0)))
    if top < 4:
        figure.update_yaxes(range=[0, 4], dtick=1)
    return over_time(figure, at_s)


def share_bar(counts: dict[queries.Placement, int]) -> Chart:
    """Expert uses by placement as one bar of 100 %."""
    total = max(1, sum(counts.values()))
    figure = Chart()
    for placement in STACK_ORDER:
        share = counts[placement] / total * 100.0
        figure.add_bar(
            x=[share],
            y=[""],
            orientation="h",
            name=PLACEMENT_NAMES[placement],
            marker={"color": PLACEMENT_COLORS[placement]},
            text=f"{share:.1f} %" if share >= 4 else "",
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": text_on(PLACEMENT_COLORS[placement]), "size": 14},
            hovertemplate=f"{PLACEMENT_NAMES[placement]}: {counts[placement]:,} uses, {share:.1f} %<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.1)
    figure = layout(figure, height=64)
    figure.update_xaxes(visible=False, range=[0, 100])
    figure.update_yaxes(visible=False)
    figure.update_layout(margin={"l": 0, "r": 0, "t": 4, "b": 4})
    return figure


def _discrete_scale() -> list[list[object]]:
    """A colour for each value of `PlacementGrid.dominant`."""
    colors = [PLACEMENT_COLORS[place] for place in queries.Placement] + [UNUSED]
    return [[edge / len(colors), color] for code, color in enumerate(colors) for edge in (code, code + 1)]


def _hover(uses: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], str]:
    """[layers, experts, 2]: hits and uses on the CPU, and what follows each number; a third of a refresh's bytes.

    Counts where all fit a byte, else per cent of the expert's uses, so that a long run's page sends no more.
    """
    shown = uses[..., [queries.Placement.HIT, queries.Placement.CPU]]
    if uses.max(initial=0) <= np.iinfo(np.uint8).max:
        return shown.astype(np.uint8), ""
    total = np.maximum(1, uses.sum(axis=-1, keepdims=True))
    return np.rint(shown / total * 100).astype(np.uint8), " %"


def placement_grid(grid: queries.PlacementGrid, *, colour_by: str) -> Chart:
    """Layer × expert heatmap with each layer's shares beside it. `colour_by` is "place", "hit share" or "uses"."""
    layers, experts = grid.total.shape
    row_height = 34 if layers <= 12 else max(12, 560 // layers)
    figure = Chart(widths=(0.84, 0.16), spacing=0.015)
    if colour_by == "place":
        values, scale, low, high = grid.dominant, _discrete_scale(), -0.5, queries.UNUSED + 0.5
    elif colour_by == "hit share":
        values = np.where(grid.total > 0, np.nan_to_num(grid.hit_share) * 100, np.nan)
        scale, low, high = depths(HIT), 0.0, 100.0
    else:
        values, low, high = grid.total, 0.0, float(max(1, grid.total.max(initial=0)))
        scale = depths(AMOUNT)
    hover, unit = _hover(grid.uses)
    figure.add_heatmap(
        z=values,
        customdata=hover,
        colorscale=scale,
        zmin=low,
        zmax=high,
        showscale=False,
        xgap=1,
        ygap=1,
        hovertemplate=(
            f"layer %{{y}}, expert %{{x}}: %{{customdata[0]}}{unit} hits, %{{customdata[1]}}{unit} on CPU, "
            "the rest fetched<extra></extra>"
        ),
    )
    per_layer = grid.uses.sum(axis=1) / np.maximum(1, grid.total.sum(axis=1))[:, None] * 100
    for placement in STACK_ORDER:
        figure.add_bar(
            x=per_layer[:, placement],
            y=np.arange(layers),
            orientation="h",
            name=PLACEMENT_NAMES[placement],
            marker={"color": PLACEMENT_COLORS[placement], "line": {"width": 0}},
            hovertemplate="layer %{y}: %{x:.1f} % " + PLACEMENT_NAMES[placement] + "<extra></extra>",
            plot=2,
        )
    figure.update_layout(barmode="stack", bargap=0.12)
    figure = layout(figure, height=row_height * layers + 70)
    figure.update_yaxes(autorange="reversed", showgrid=False, dtick=1 if layers <= 16 else 4)
    figure.update_yaxes(title="MoE layer", plot=1)
    figure.update_xaxes(title="expert", showgrid=False, dtick=4 if experts <= 64 else 8, plot=1)
    figure.update_xaxes(title="% of its uses", range=[0, 100], showgrid=False, plot=2)
    return figure


def percentiles(series: queries.PercentileSeries) -> Chart:
    """p50, p95 and p99 over time, milliseconds."""
    figure = Chart()
    known = ~np.isnan(series.p50)
    at = moments(series.at_s[known])
    for label, values, dash, width in (
        ("p99", series.p99, "dot", 1.5),
        ("p95", series.p95, "dash", 1.8),
        ("p50", series.p50, "solid", 2.6),
    ):
        figure.add_scatter(
            x=at,
            y=packed(values[known]),
            name=label,
            mode="lines+markers",
            line={"color": QUANTITY, "width": width, "dash": dash},
            marker={"size": 5, "color": QUANTITY},
            hovertemplate="%{y:,.1f} ms",
        )
    return over_time(figure, series.at_s, height=260)
