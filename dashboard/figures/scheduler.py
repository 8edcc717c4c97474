"""Figures of the scheduler's plans and predictions, and of a CPU that computes alone. See `base`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from twofold.telemetry import queries

from dashboard.figures.base import F64, layout, moments, over_time
from dashboard.figures.chart import Chart
from dashboard.palette import AMOUNT, CPU, FAILED, QUANTITY, UNUSED, depths, faint


def plan_mix(counts: npt.NDArray[np.int64]) -> Chart:
    """Layers of decode steps by misses and by how many of them were fetched, percent of all layers."""
    share = counts / max(1, int(counts.sum())) * 100
    misses, fetched = (np.flatnonzero(counts.sum(axis=axis)) for axis in (1, 0))
    shape = (int(misses.max(initial=0)) + 1, int(fetched.max(initial=0)) + 1)
    share = share[: shape[0], : shape[1]]
    figure = Chart()
    figure.add_heatmap(
        z=share,
        colorscale=[[0, UNUSED], [0.001, faint(AMOUNT, 0.08)], [1, faint(AMOUNT, 0.55)]],
        zmin=0,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate="%{y} misses, %{x} of them fetched: %{z:.2f} % of the layers<extra></extra>",
    )
    rows, columns = np.nonzero(share >= 0.05)
    # A trace of its own: a heatmap's text ignores the theme, and nearly transparent squares then hide it.
    figure.add_scatter(
        x=columns,
        y=rows,
        mode="text",
        text=[f"{value:.1f} %" for value in share[rows, columns].tolist()],
        hoverinfo="skip",
    )
    figure = layout(figure, height=110 + 30 * shape[0])
    figure.update_xaxes(title="fetched over PCIe", dtick=1, showgrid=False)
    figure.update_yaxes(title="misses", dtick=1, showgrid=False, autorange="reversed")
    return figure


def alternatives(prices: Sequence[float] | None, plan: queries.UsualPlan) -> Chart:
    """Layer time by number of misses fetched, as priced and as recorded, and how often each was chosen."""
    fetched = np.arange(plan.num_misses + 1)
    chosen = plan.fetched / max(1, int(plan.fetched.sum()))
    figure = Chart()
    if prices is not None:
        figure.add_bar(
            x=fetched,
            y=prices,
            name="priced, idle link",
            customdata=chosen * 100,
            marker={"color": [faint(QUANTITY, 0.25 + 0.75 * share) for share in chosen.tolist()]},
            text=[f"chosen {share:.0%}" if share >= 0.005 else "" for share in chosen.tolist()],
            textposition="inside",
            hovertemplate="%{x} fetched: %{y:.0f} µs, chosen %{customdata:.1f} %",
        )
    figure.add_scatter(
        x=fetched,
        y=plan.median_us,
        name="median of the recorded layers",
        mode="markers",
        marker={"color": FAILED, "size": 12, "symbol": "diamond"},
        hovertemplate="%{x} fetched: %{y:.0f} µs",
    )
    figure = layout(figure, height=280, legend=True)
    figure.update_xaxes(title="misses fetched; the others run on the CPU", dtick=1)
    figure.update_yaxes(title="layer time, µs", rangemode="tozero")
    return figure


def estimated_measured(predicted_us: F64, measured_us: F64, *, bins: int = 60) -> Chart:
    """Density of layers by predicted and measured time, log-log; on the diagonal the model is right."""
    known = (predicted_us > 0) & (measured_us > 0)
    x, y = np.log10(predicted_us[known]), np.log10(measured_us[known])
    low = float(min(x.min(initial=9.0), y.min(initial=9.0)))
    high = float(max(np.percentile(x, 99.9), np.percentile(y, 99.9))) if known.any() else low + 1
    edges = np.linspace(low, high + 1e-6, bins + 1)
    counts, _, _ = np.histogram2d(y, x, bins=(edges, edges))
    depth = np.where(counts > 0, 1 + np.log1p(counts) / np.log1p(max(counts.max(), 1)) * 249, 0).astype(
        np.uint8
    )
    middle = (edges[:-1] + edges[1:]) / 2
    figure = Chart()
    figure.add_heatmap(
        x=10**middle,
        y=10**middle,
        z=depth,
        colorscale=[[0, "rgba(0,0,0,0)"], [0.004, depths(AMOUNT)[0][1]], [1, depths(AMOUNT)[1][1]]],
        showscale=False,
        hovertemplate="predicted %{x:.0f} µs, measured %{y:.0f} µs<extra></extra>",
    )
    ends = [10**low, 10**high]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": FAILED, "dash": "dot", "width": 2}, hoverinfo="skip"
    )
    figure = layout(figure, height=340)
    ticks = [each * 10.0**power for power in range(-1, 7) for each in (1, 3)]
    figure.update_xaxes(type="log", title="predicted, µs", tickvals=ticks)
    figure.update_yaxes(type="log", title="measured, µs", tickvals=ticks)
    return figure


def residuals(found: queries.LayerResiduals) -> Chart:
    """Measured / predicted − 1 by layer in percent: median, and the band from the 10th to the 90th percentile."""
    layer = np.arange(len(found.p50))
    figure = Chart()
    figure.add_scatter(
        x=layer, y=found.p90 * 100, mode="lines", line={"width": 0}, hoverinfo="skip", showlegend=False
    )
    figure.add_scatter(
        x=layer,
        y=found.p10 * 100,
        mode="lines",
        line={"width": 0},
        fill="tonexty",
        fillcolor=faint(QUANTITY, 0.25),
        name="10th to 90th percentile",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=layer,
        y=found.p50 * 100,
        mode="lines+markers",
        line={"color": QUANTITY, "width": 2},
        name="median",
        hovertemplate="layer %{x}: %{y:+.1f} %<extra></extra>",
    )
    figure = layout(figure, height=340, legend=True)
    figure.update_xaxes(title="MoE layer", dtick=1 if len(layer) <= 16 else 8)
    figure.update_yaxes(title="measured against predicted, %", zeroline=True)
    return figure


def cpu_bandwidth(found: queries.CpuBandwidth, *, ceiling: float | None) -> Chart:
    """Expert weights read by the CPU over time in GB/s, and the calibrated bandwidth if known."""
    figure = Chart()
    at = moments(found.at_s)
    figure.add_scatter(
        x=at,
        y=found.over_time,
        name="expert weights read",
        mode="lines" if len(at) > 2 else "lines+markers",
        line={"color": CPU, "width": 2},
        hovertemplate="%{y:.1f} GB/s",
    )
    if ceiling is not None and len(at):
        figure.add_scatter(
            x=[at[0], at[-1]],
            y=[ceiling] * 2,
            name="calibrated ceiling",
            mode="lines",
            line={"color": FAILED, "width": 2},
            hovertemplate="%{y:.1f} GB/s",
        )
    figure.update_yaxes(title="GB/s")
    return over_time(figure, found.at_s, height=260)


def cpu_bandwidth_by_layer(found: queries.CpuBandwidth) -> Chart:
    """Median GB/s of each layer's experts on the CPU."""
    figure = Chart()
    figure.add_bar(
        x=np.arange(len(found.by_layer)),
        y=found.by_layer,
        marker={"color": faint(CPU, 0.85)},
        hovertemplate="layer %{x}: %{y:.1f} GB/s<extra></extra>",
    )
    figure = layout(figure, height=260)
    figure.update_xaxes(title="MoE layer", dtick=1 if len(found.by_layer) <= 16 else 8)
    figure.update_yaxes(title="GB/s", rangemode="tozero")
    return figure
