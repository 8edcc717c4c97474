"""A load test over time: users, latencies, failures, hit rate and PCIe on one time axis. See `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import MAX_POINTS, layout, moments, packed, spaced
from dashboard.figures.chart import Chart
from dashboard.palette import FAILED, HIT, QUANTITY, faint

_LINES: Final = (("p99", "dot", 1.3), ("p95", "dash", 1.6), ("p50", "solid", 2.4))
_ROW_PX: Final = 150
_USERS_POINTS: Final = 1000


def stages(finished_s: np.ndarray, stage: Sequence[str]) -> list[tuple[str, float]]:
    """Stages in the order of their first answers: name and Unix time of that answer."""
    first: dict[str, float] = {}
    for name, at_s in zip(stage, finished_s.tolist(), strict=True):
        if name and name not in first:
            first[name] = at_s
    return list(first.items())


def timeline(samples: queries.LoadSamples, overview: queries.Overview | None) -> Chart:
    """Rows over one time axis; the engine's rows are missing where `overview` is None."""
    has_cache = overview is not None and overview.totals.has_slots
    lines = "p50 solid, p95 dashed, p99 dotted"
    titles = ["users", f"TTFT, ms ({lines})", f"TPOT, ms ({lines})"] + (
        ["hit rate, %", "PCIe, GB/s"] if has_cache else []
    )
    figure = Chart(rows=len(titles), spacing=0.045)
    _users(figure, samples)
    for row, values in ((2, samples.ttft_ms), (3, samples.tpot_ms)):
        _percentiles(figure, samples.finished_s, values, row=row)
    if overview is not None and has_cache:
        _line(figure, overview.at_s, overview.hit_rate * 100.0, row=4, color=HIT, unit="%")
        _line(figure, overview.at_s, overview.upload_bytes_per_s / 1e9, row=5, color=QUANTITY, unit="GB/s")
    for name, at_s in stages(samples.finished_s, getattr(samples, "stage", [""] * len(samples.finished_s))):
        figure.add_vline(
            x=float(moments(np.array([at_s]))[0]),
            line={"color": faint(QUANTITY, 0.5), "dash": "dot", "width": 1},
            text=name,
        )
    figure = layout(figure, height=_ROW_PX * len(titles) + 40)
    figure.update_layout(hovermode="x unified", margin={"t": 30})
    figure.add_titles(titles)
    figure.update_yaxes(rangemode="tozero", nticks=4)
    figure.update_xaxes(type="date", tickformat="%H:%M:%S", nticks=7)
    return figure


def _users(figure: Chart, samples: queries.LoadSamples) -> None:
    count = len(samples.ok)
    shown = np.linspace(0, count - 1, min(count, _USERS_POINTS)).astype(np.int64)
    figure.add_scatter(
        x=moments(samples.finished_s[shown]),
        y=packed(samples.num_users[shown]),
        name="users",
        mode="lines",
        line={"color": QUANTITY, "width": 2, "shape": "hv"},
        fill="tozeroy",
        fillcolor=faint(QUANTITY, 0.14),
        hovertemplate="%{y} users<extra></extra>",
    )
    failed = np.flatnonzero(~samples.ok)[:MAX_POINTS]
    if len(failed):
        figure.add_scatter(
            x=moments(samples.finished_s[failed]),
            y=samples.num_users[failed],
            name="failed request",
            mode="markers",
            marker={"color": FAILED, "symbol": "x", "size": 9},
            hovertemplate="failed<extra></extra>",
        )


def _percentiles(figure: Chart, at_s: np.ndarray, values: np.ndarray, *, row: int) -> None:
    series = queries.percentile_series(at_s, values, max_buckets=60)
    known = ~np.isnan(series.p50)
    for name, dash, width in _LINES:
        figure.add_scatter(
            x=moments(series.at_s[known]),
            y=packed(getattr(series, name)[known]),
            name=name,
            mode="lines" if known.sum() > 2 else "lines+markers",
            line={"color": QUANTITY, "width": width, "dash": dash},
            hovertemplate=f"{name} %{{y:,.1f}} ms<extra></extra>",
            plot=row,
        )


def _line(figure: Chart, at_s: np.ndarray, values: np.ndarray, *, row: int, color: str, unit: str) -> None:
    figure.add_scatter(
        **spaced(at_s),
        y=packed(values),
        mode="lines",
        line={"color": color, "width": 2, "shape": "hv"},
        hovertemplate=f"%{{y:,.2f}} {unit}<extra></extra>",
        plot=row,
    )
