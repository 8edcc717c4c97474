"""Figures of the expert cache: hits by layer, reuse, what uploads paid back, other policies. See `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from twofold.telemetry import queries
from twofold.tools.lab import recorded_run

from dashboard.figures.base import F64, layout
from dashboard.figures.chart import Chart
from dashboard.figures.link import REASON_NAMES
from dashboard.palette import FAILED, HIT, QUANTITY, REASON_COLORS, faint

_USES: Final = ("0", "1", "2–3", "4–7", "8–15", "16+")


def by_layer(hit_share: F64) -> Chart:
    """Hit rate of each layer in percent, and their mean."""
    figure = Chart()
    figure.add_bar(
        x=np.arange(len(hit_share)),
        y=hit_share * 100,
        marker={"color": faint(HIT, 0.85), "line": {"width": 0}},
        hovertemplate="layer %{x}: %{y:.1f} %<extra></extra>",
    )
    figure = layout(figure, height=240)
    figure.update_xaxes(title="MoE layer", dtick=1 if len(hit_share) <= 16 else 8)
    figure.update_yaxes(title="% hits", range=[0, 100], dtick=25)
    return figure


def lru_curve(rates: F64, *, num_slots: float, hit_rate: float | None) -> Chart:
    """Hit rate of an LRU cache by slots per layer, with this run's own point."""
    figure = Chart()
    figure.add_scatter(
        x=np.arange(len(rates)),
        y=rates * 100,
        name="LRU cache of that size",
        mode="lines",
        line={"color": QUANTITY, "width": 2.5},
        fill="tozeroy",
        fillcolor=faint(QUANTITY, 0.14),
        hovertemplate="%{x} slots per layer: %{y:.1f} %<extra></extra>",
    )
    if hit_rate is not None and num_slots > 0:
        figure.add_scatter(
            x=[num_slots],
            y=[hit_rate * 100],
            name="this run",
            mode="markers",
            marker={"color": HIT, "size": 13, "line": {"width": 1, "color": "white"}},
            hovertemplate="%{x:.0f} slots per layer: %{y:.1f} % (this run)<extra></extra>",
        )
    figure = layout(figure, height=280, legend=True)
    figure.update_xaxes(title="slots per layer", range=[0, len(rates) - 1])
    figure.update_yaxes(title="% hits", range=[0, 100], dtick=25)
    return figure


def payback(paybacks: queries.Paybacks) -> Chart:
    """Share of each reason's uploads by the number of steps that used them."""
    edges = np.array([1, 2, 4, 8, 16])
    bucket = np.searchsorted(edges, paybacks.num_uses, side="right")
    figure = Chart()
    for reason, color in REASON_COLORS.items():
        own = bucket[paybacks.copies.reason == reason]
        if len(own):
            counts = np.bincount(own, minlength=len(_USES))
            figure.add_bar(
                x=list(_USES),
                y=counts / len(own) * 100,
                customdata=counts,
                name=REASON_NAMES[reason],
                marker={"color": color},
                hovertemplate="%{y:.1f} % (%{customdata:,}) used %{x} times",
            )
    figure.update_layout(barmode="group")
    figure = layout(figure, height=280, legend=True)
    figure.update_xaxes(title="uses before the slot went to another expert", type="category")
    figure.update_yaxes(title="% of uploads")
    return figure


def policies(
    results: Sequence[recorded_run.PolicyResult | recorded_run.StepsReplay],
    *,
    recorded: float | None,
    uploads: float | None,
) -> Chart:
    """Hit rate against uploads per token, one point per policy: up and to the left is better."""
    figure = Chart()
    points: list[tuple[str, float, float, str]] = [
        (each.policy, each.uploads_per_token, each.hit_rate, QUANTITY) for each in results
    ]
    if recorded is not None and uploads is not None:
        points.append(("this run", uploads, recorded, HIT))
    most = max((copied for _, copied, _, _ in points), default=1.0)
    for name, copied, rate, color in points:
        oracle = "oracle" in name or name == "belady"
        figure.add_scatter(
            x=[copied],
            y=[rate * 100],
            mode="markers+text",
            text=[name],
            textposition="top right" if copied < 0.6 * most else "top left",
            marker={
                "size": 14,
                "color": FAILED if oracle else color,
                "symbol": "star" if oracle else "circle",
                "line": {"width": 1, "color": "white"},
            },
            hovertemplate=f"{name}: %{{y:.1f}} % hits, %{{x:.2f}} uploads per token<extra></extra>",
        )
    figure = layout(figure, height=320)
    low = min((rate for _, _, rate, _ in points), default=0.0) * 100
    figure.update_xaxes(title="uploads per token", range=[-0.12 * most, 1.2 * most + 0.01])
    figure.update_yaxes(title="% hits", range=[max(0.0, low - 10), 100])
    return figure


def policy_table(
    results: Sequence[recorded_run.PolicyResult], costs: Sequence[float], lru_cost: float
) -> str:
    """HTML table of replayed policies; cost is relative to LRU's."""
    rows = "".join(
        f'<tr><td class="tf-experts">{each.policy}</td><td>{each.hit_rate:.1%}</td>'
        f"<td>{each.uploads_per_token:.2f}</td><td>{cost:.2f}</td>"
        f"<td>{cost / lru_cost if lru_cost else 1.0:.2f}</td></tr>"
        for each, cost in zip(results, costs, strict=True)
    )
    head = "<th>hit rate</th><th>uploads/token</th><th>cost/token</th><th>cost vs LRU</th>"
    return (
        f'<table class="tf-layers"><thead><tr><th class="tf-experts">policy</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def replay_table(results: Sequence[recorded_run.StepsReplay]) -> str:
    """HTML table of replayed steps; times are relative to the first policy's, the run's own."""
    own_us = results[0].moe_us_per_token
    rows = "".join(
        f'<tr><td class="tf-experts">{each.policy}</td><td>{each.hit_rate:.1%}</td>'
        f"<td>{each.uploads_per_token:.2f}</td><td>{each.moe_us_per_token:,.1f} µs</td>"
        f"<td>{each.moe_us_per_token / own_us if own_us else 1.0:.2f}</td></tr>"
        for each in results
    )
    head = "<th>hit rate</th><th>uploads/token</th><th>MoE layers/token</th><th>time vs own policy</th>"
    return (
        f'<table class="tf-layers"><thead><tr><th class="tf-experts">policy</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def hits_of(grid: queries.PlacementGrid) -> npt.NDArray[np.float64]:
    """Share of hits by layer, NaN where a layer was not used."""
    used = grid.uses.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(used[:, queries.Placement.HIT] / used.sum(axis=1), np.float64)
