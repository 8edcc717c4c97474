"""Plotly figures from what queries return. No Streamlit, no database: arrays in, a figure out.

Colours are Okabe and Ito's, told apart with every kind of colour vision; the same thing has the same colour
on every page. Arrays stay NumPy, heatmaps uint8: Plotly then sends them packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from twofold.telemetry import queries

F64 = npt.NDArray[np.float64]

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
HIT, FETCHED, CPU, UNUSED = "#009e73", "#e69f00", "#0072b2", "#e8ebef"
ACCENT, WARN = "#0f766e", "#d55e00"
PLACEMENT_COLORS = {
    queries.Placement.HIT: HIT,
    queries.Placement.FETCHED: FETCHED,
    queries.Placement.CPU: CPU,
}
PLACEMENT_NAMES = {
    queries.Placement.HIT: "on GPU, was there (hit)",
    queries.Placement.FETCHED: "on GPU, fetched for it",
    queries.Placement.CPU: "on CPU",
}
SHORT_NAMES = {
    queries.Placement.HIT: "GPU, hit",
    queries.Placement.FETCHED: "GPU, fetched",
    queries.Placement.CPU: "CPU",
}
STACK_ORDER = (queries.Placement.HIT, queries.Placement.FETCHED, queries.Placement.CPU)

_TRANSPARENT = "rgba(0,0,0,0)"


def _layout(figure: go.Figure, *, height: int, legend: bool = False) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 12, "t": 30 if legend else 10, "b": 8},
        paper_bgcolor=_TRANSPARENT,
        plot_bgcolor=_TRANSPARENT,
        font={"family": "Source Sans, Source Sans Pro, sans-serif", "size": 13, "color": INK},
        hoverlabel={"bgcolor": "white", "font": {"color": INK}},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True, title_font={"color": MUTED})
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, title_font={"color": MUTED})
    return figure


def _moments(at_s: F64) -> list[datetime]:
    """Unix seconds in the time zone of this machine, as Plotly shows dates: without one."""
    return [datetime.fromtimestamp(at) for at in at_s.tolist()]


def _over_time(figure: go.Figure, at_s: F64) -> go.Figure:
    """A time axis that says the time of day once per tick and no date."""
    spread_s = float(at_s[-1] - at_s[0]) if len(at_s) else 0.0
    return figure.update_xaxes(tickformat="%H:%M:%S" if spread_s < 900 else "%H:%M", nticks=7)


def _alpha(color: str, alpha: float) -> str:
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def area(
    at_s: F64, values: F64, *, name: str, unit: str, color: str = ACCENT, height: int = 230
) -> go.Figure:
    """One quantity over time, each value for its whole bucket; NaN leaves a gap."""
    figure = go.Figure()
    # The filling is a trace of its own: Plotly would fill straight across a gap of the line.
    figure.add_scatter(
        x=_moments(at_s),
        y=np.nan_to_num(values),
        mode="lines",
        line={"width": 0, "shape": "hv"},
        fill="tozeroy",
        fillcolor=_alpha(color, 0.16),
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=_moments(at_s),
        y=values,
        name=name,
        mode="lines" if np.count_nonzero(~np.isnan(values)) > 2 else "lines+markers",
        line={"color": color, "width": 2, "shape": "hv"},
        hovertemplate="%{y:,.1f} " + unit + "<extra></extra>",
    )
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(rangemode="tozero")
    return _over_time(_layout(figure, height=height), at_s)


def shares(at_s: F64, values: F64, *, bucket_s: float, height: int = 230) -> go.Figure:
    """Where routed experts ran over time: `values` [3, buckets] by Placement, stacked to 100 %; NaN leaves a gap."""
    figure = go.Figure()
    for placement in STACK_ORDER:
        figure.add_bar(
            x=_moments(at_s),
            y=values[placement] * 100.0,
            name=SHORT_NAMES[placement],
            width=bucket_s * 1000.0,
            offset=0,
            marker={"color": _alpha(PLACEMENT_COLORS[placement], 0.8), "line": {"width": 0}},
            hovertemplate="%{y:.1f} %",
        )
    figure.update_layout(hovermode="x unified", barmode="stack", bargap=0)
    figure.update_yaxes(range=[0, 100], dtick=25)
    return _over_time(_layout(figure, height=height, legend=True), at_s)


def queue(at_s: F64, running: F64, waiting: F64, *, height: int = 230) -> go.Figure:
    """Requests that run and wait, over time."""
    figure = go.Figure()
    for name, values, color in (("running", running, ACCENT), ("waiting", waiting, WARN)):
        figure.add_scatter(
            x=_moments(at_s),
            y=values,
            name=name,
            mode="lines",
            line={"width": 2, "color": color},
            fill="tozeroy" if name == "running" else None,
            fillcolor=_alpha(color, 0.14),
            hovertemplate="%{y:.1f}",
        )
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(rangemode="tozero")
    top = float(max(np.max(running, initial=0.0), np.max(waiting, initial=0.0)))
    if top < 4:
        figure.update_yaxes(range=[0, 4], dtick=1)
    return _over_time(_layout(figure, height=height, legend=True), at_s)


def share_bar(counts: dict[queries.Placement, int], *, height: int = 64) -> go.Figure:
    """Uses by placement as one bar of 100 %."""
    total = max(1, sum(counts.values()))
    figure = go.Figure()
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
            textfont={"color": "white", "size": 14},
            hovertemplate=f"{PLACEMENT_NAMES[placement]}: {counts[placement]:,} uses, {share:.1f} %<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.1)
    figure = _layout(figure, height=height)
    figure.update_xaxes(visible=False, range=[0, 100])
    figure.update_yaxes(visible=False)
    figure.update_layout(margin={"l": 0, "r": 0, "t": 4, "b": 4})
    return figure


_PLACE_CODES = (
    (queries.UNUSED, UNUSED),
    (queries.ON_CPU, CPU),
    (queries.FETCHED, FETCHED),
    (queries.HIT, HIT),
)


def _discrete_scale() -> list[list[object]]:
    count = len(_PLACE_CODES)
    return [[edge / count, color] for code, color in _PLACE_CODES for edge in (code, code + 1)]


def _hover_counts(uses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[layers, experts, 4]: hits, on CPU, fetched, total."""
    return np.concatenate([uses, uses.sum(axis=2, keepdims=True)], axis=2)


def placement_grid(grid: queries.PlacementGrid, *, colour_by: str) -> go.Figure:
    """Layer × expert; beside it each layer's shares. `colour_by` is "place", "hit share" or "uses"."""
    layers, experts = grid.total.shape
    row_height = 34 if layers <= 12 else max(12, 560 // layers)
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, column_widths=[0.84, 0.16], horizontal_spacing=0.015
    )
    if colour_by == "place":
        values, scale, low, high = grid.dominant, _discrete_scale(), -0.5, 3.5
    elif colour_by == "hit share":
        values = np.where(grid.total > 0, np.nan_to_num(grid.hit_share) * 100, np.nan)
        scale, low, high = [[0, CPU], [0.5, "#f3ead2"], [1, HIT]], 0.0, 100.0
    else:
        values, low, high = grid.total, 0.0, float(max(1, grid.total.max(initial=0)))
        scale = [[0, UNUSED], [1, "#4c1d95"]]
    figure.add_heatmap(
        z=values,
        customdata=_hover_counts(grid.uses),
        colorscale=scale,
        zmin=low,
        zmax=high,
        showscale=False,
        xgap=1,
        ygap=1,
        hovertemplate=(
            "layer %{y}, expert %{x}<br>used %{customdata[3]:,} times: %{customdata[0]:,} hits, "
            "%{customdata[2]:,} fetched, %{customdata[1]:,} on CPU<extra></extra>"
        ),
        row=1,
        col=1,
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
            row=1,
            col=2,
        )
    figure.update_layout(barmode="stack", bargap=0.12)
    figure = _layout(figure, height=row_height * layers + 70)
    figure.update_yaxes(autorange="reversed", showgrid=False, dtick=1 if layers <= 16 else 4)
    figure.update_yaxes(title="MoE layer", row=1, col=1)
    figure.update_xaxes(title="expert", showgrid=False, dtick=4 if experts <= 64 else 8, row=1, col=1)
    figure.update_xaxes(title="% of its uses", range=[0, 100], showgrid=False, row=1, col=2)
    return figure


def token_times(
    position: npt.NDArray[np.int64], step_us: F64, misses: npt.NDArray[np.int64], chosen: int, *, unit: str
) -> go.Figure:
    """How long the step of each token took, one bar a token; `chosen` is the index of the one explained."""
    figure = go.Figure(
        go.Bar(
            x=position,
            y=step_us / 1e3,
            customdata=misses,
            marker={
                "color": misses,
                "colorscale": [[0, HIT], [0.5, FETCHED], [1, WARN]],
                "cmin": 0,
                "colorbar": {"title": {"text": "misses"}, "thickness": 10, "outlinewidth": 0},
                "line": {
                    "width": [2 if index == chosen else 0 for index in range(len(position))],
                    "color": INK,
                },
            },
            hovertemplate="token at position %{x}<br>%{y:.2f} "
            + unit
            + ", %{customdata} misses<extra></extra>",
        )
    )
    figure.update_layout(bargap=0.15)
    figure = _layout(figure, height=230)
    figure.update_xaxes(title="position in the text (prompt first)", showgrid=False)
    figure.update_yaxes(title=unit, rangemode="tozero")
    if len(position):
        figure.add_annotation(
            x=int(position[chosen]),
            y=float(np.nan_to_num(step_us[chosen]) / 1e3),
            text="explained below",
            showarrow=True,
            arrowhead=2,
            arrowcolor=INK,
            ay=-22,
            ax=0,
            font={"size": 12, "color": INK},
        )
        figure.update_yaxes(range=[0, float(np.nanmax(step_us, initial=0.001)) / 1e3 * 1.22])
    return figure


def token_layer_misses(position: npt.NDArray[np.int64], num_by_placement: npt.NDArray[np.int64]) -> go.Figure:
    """Token × layer: how many of the routed experts were not on the GPU when they were needed."""
    misses = num_by_placement[:, :, [queries.Placement.CPU, queries.Placement.FETCHED]].sum(axis=2)
    routed = int(num_by_placement.sum(axis=2).max(initial=1))
    figure = go.Figure(
        go.Heatmap(
            x=position,
            z=misses.T.astype(np.uint8),
            customdata=num_by_placement.transpose(1, 0, 2),
            colorscale=[[0, HIT], [0.5, FETCHED], [1, WARN]],
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
    )
    figure = _layout(figure, height=26 * max(4, misses.shape[1]) + 70 if misses.shape[1] <= 12 else 420)
    figure.update_yaxes(title="MoE layer", autorange="reversed", showgrid=False)
    figure.update_xaxes(title="position in the text (prompt first)", showgrid=False)
    return figure


def layer_times(layer_us: F64, cpu_us: F64, gpu_us: F64, predicted_us: F64) -> go.Figure:
    """Of one token: per layer the time on CPU and GPU side by side, what the layer took and was predicted to."""
    layers = np.arange(len(layer_us))
    figure = go.Figure()
    figure.add_bar(x=layers, y=cpu_us, name="CPU part", marker={"color": CPU})
    figure.add_bar(x=layers, y=gpu_us, name="GPU part", marker={"color": HIT})
    for name, values, symbol, color in (
        ("layer", layer_us, "line-ew-open", INK),
        ("predicted", predicted_us, "diamond-open", WARN),
    ):
        figure.add_scatter(
            x=layers,
            y=values,
            name=name,
            mode="markers",
            marker={
                "symbol": symbol,
                "size": 12 if symbol == "diamond-open" else 22,
                "color": color,
                "line": {"width": 2},
            },
        )
    figure.update_traces(hovertemplate="%{y:.1f} µs")
    figure.update_layout(barmode="group", bargap=0.35, hovermode="x unified")
    figure = _layout(figure, height=270, legend=True)
    figure.update_xaxes(title="MoE layer", dtick=1 if len(layers) <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="µs", rangemode="tozero")
    return figure


_REASON_COLORS = {
    queries.UploadReason.DEMAND: FETCHED,
    queries.UploadReason.ADMISSION: HIT,
    queries.UploadReason.PREFETCH: CPU,
}


def upload_timeline(uploads: Sequence[queries.Upload]) -> go.Figure:
    """Copies of a step on the link: waiting faint, copying full; milliseconds since the first was queued."""
    origin_us = min((upload.queued_us for upload in uploads), default=0.0)
    figure = go.Figure()
    for reason, color in _REASON_COLORS.items():
        mine = [(index, upload) for index, upload in enumerate(uploads) if upload.reason is reason]
        if not mine:
            continue
        labels = [f"layer {upload.layer}, expert {upload.expert}" for _, upload in mine]
        rows = [index for index, _ in mine]
        for name, begins, ends, opacity in (
            ("waits", [u.queued_us for _, u in mine], [u.begin_us for _, u in mine], 0.25),
            (reason.name.lower(), [u.begin_us for _, u in mine], [u.end_us for _, u in mine], 1.0),
        ):
            figure.add_bar(
                y=rows,
                base=[(begin - origin_us) / 1e3 for begin in begins],
                x=[(end - begin) / 1e3 for begin, end in zip(begins, ends, strict=True)],
                orientation="h",
                name=name,
                showlegend=opacity == 1.0,
                text=None,
                customdata=labels,
                marker={"color": color, "opacity": opacity, "line": {"width": 0}},
                hovertemplate="%{customdata}: %{x:.3f} ms<extra>" + name + "</extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0.2)
    figure = _layout(figure, height=270, legend=True)
    figure.update_xaxes(title="ms since the step's first upload was asked for", rangemode="tozero")
    figure.update_yaxes(
        title="one row per upload", showticklabels=False, autorange="reversed", showgrid=False
    )
    return figure


def percentiles(series: queries.PercentileSeries, *, height: int = 260) -> go.Figure:
    """p50, p95 and p99 over time, milliseconds."""
    figure = go.Figure()
    known = ~np.isnan(series.p50)
    moments = _moments(series.at_s[known])
    for label, values, color, width in (
        ("p99", series.p99, "#c9d2dd", 1.5),
        ("p95", series.p95, FETCHED, 1.8),
        ("p50", series.p50, ACCENT, 2.5),
    ):
        figure.add_scatter(
            x=moments,
            y=values[known],
            name=label,
            mode="lines+markers",
            line={"color": color, "width": width},
            marker={"size": 5},
            hovertemplate="%{y:,.1f} ms",
        )
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(rangemode="tozero")
    return _over_time(_layout(figure, height=height, legend=True), series.at_s)


def users(finished_s: F64, num_users: npt.NDArray[np.int64], ok: npt.NDArray[np.bool_]) -> go.Figure:
    """Users over time, and where requests failed."""
    figure = go.Figure()
    figure.add_scatter(
        x=_moments(finished_s),
        y=num_users,
        name="users",
        mode="lines",
        line={"color": ACCENT, "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor=_alpha(ACCENT, 0.14),
        hovertemplate="%{y} users",
    )
    if not ok.all():
        figure.add_scatter(
            x=_moments(finished_s[~ok]),
            y=num_users[~ok],
            name="failed request",
            mode="markers",
            marker={"color": WARN, "symbol": "x", "size": 10},
            hovertemplate="failed",
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return _over_time(_layout(figure, height=200, legend=True), finished_s)
