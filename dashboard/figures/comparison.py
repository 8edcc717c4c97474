"""Figures of two runs. See `base`."""

from __future__ import annotations

import numpy as np

from dashboard.figures.base import F64, layout
from dashboard.figures.chart import Chart
from dashboard.palette import QUANTITY

_MAX_STEPS = 200


def cumulative(first: F64, second: F64, numbers: tuple[int, int]) -> Chart:
    """Cumulative distributions of two series; NaN is left out. `numbers` names the runs."""
    figure = Chart()
    share = np.linspace(0.0, 1.0, _MAX_STEPS + 1)
    for number, values, dash in zip(numbers, (first, second), ("dot", "solid"), strict=True):
        known = values[~np.isnan(values)]
        if not len(known):
            continue
        figure.add_scatter(
            x=np.quantile(known, share),
            y=share * 100.0,
            name=f"run {number}",
            mode="lines",
            line={"color": QUANTITY, "width": 2, "dash": dash},
            hovertemplate="%{y:.0f} % within %{x:,.1f} ms",
        )
    figure = layout(figure, height=260, legend=True)
    figure.update_yaxes(title="% of requests", range=[0, 101], dtick=25)
    figure.update_xaxes(title="ms", rangemode="tozero")
    return figure
