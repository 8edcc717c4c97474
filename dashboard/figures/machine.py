"""Figures of the machine's state. See `base`."""

from __future__ import annotations

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import F64, moments, over_time, packed
from dashboard.figures.chart import Chart
from dashboard.palette import QUANTITY


def _lines(at_s: F64, lines: dict[str, tuple[F64, str, str]]) -> Chart:
    """One line per name: values, dash and unit."""
    figure = Chart()
    for name, (values, dash, unit) in lines.items():
        if np.isnan(values).all():
            continue  # the system tells nothing
        figure.add_scatter(
            x=moments(at_s),
            y=packed(values),
            name=name,
            mode="lines" if len(at_s) > 2 else "lines+markers",
            line={"color": QUANTITY, "width": 2, "dash": dash},
            hovertemplate=f"%{{y:,.1f}} {unit}",
        )
    return over_time(figure, at_s)


def clock(samples: queries.MachineSamples) -> Chart:
    """Mean and lowest clock rate of the cores."""
    return _lines(
        samples.at_s,
        {
            "mean of the cores": (samples.clock_mhz, "solid", "MHz"),
            "slowest core": (samples.lowest_clock_mhz, "dot", "MHz"),
        },
    )


def warmth(samples: queries.MachineSamples) -> Chart:
    """Temperature and load."""
    return _lines(
        samples.at_s,
        {
            "load, last minute": (samples.load_1m, "solid", "threads"),
            "temperature": (samples.temperature_c, "dot", "°C"),
        },
    )
