"""Figures of several runs. See `base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from dashboard.figures.base import F64, layout
from dashboard.figures.chart import Chart
from dashboard.palette import DEVICES, QUANTITY

_MAX_STEPS: Final = 200
_DASHES: Final = ("solid", "dot", "dash", "dashdot")


def cumulative(series: Mapping[int, F64]) -> Chart:
    """Cumulative distribution of each run's values, by number of the run; NaN is left out.

    The last run is solid. Two runs differ by their dashes; of more each has a colour of its own.
    """
    figure = Chart()
    share = np.linspace(0.0, 1.0, _MAX_STEPS + 1)
    for place, (number, values) in enumerate(reversed(series.items())):
        known = values[~np.isnan(values)]
        if not len(known):
            continue
        color = QUANTITY if len(series) == 2 else DEVICES[place % len(DEVICES)]
        figure.add_scatter(
            x=np.quantile(known, share),
            y=share * 100.0,
            name=f"run {number}",
            mode="lines",
            line={"color": color, "width": 2, "dash": _DASHES[place % len(_DASHES)]},
            hovertemplate="%{y:.0f} % within %{x:,.1f} ms",
        )
    figure = layout(figure, height=260, legend=True)
    figure.update_yaxes(title="% of requests", range=[0, 101], dtick=25)
    figure.update_xaxes(title="ms", rangemode="tozero")
    return figure
