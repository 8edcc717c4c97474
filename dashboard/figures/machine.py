"""Figures of the machine's state. See `base`."""

from __future__ import annotations

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import F64, moments, over_time, packed
from dashboard.figures.chart import Chart
from dashboard.palette import QUANTITY


def _lines(at_s: F64, lines: dict[str, tuple[F64, str, str]], unit: str) -> Chart:
    """One line per name: values, dash and unit. `unit`: of the axis."""
    figure = Chart()
    for name, (values, dash, of_line) in lines.items():
        if np.isnan(values).all():
            continue  # the system tells nothing
        figure.add_scatter(
            x=moments(at_s),
            y=packed(values),
            name=name,
            mode="lines" if len(at_s) > 2 else "lines+markers",
            line={"color": QUANTITY, "width": 2, "dash": dash},
            hovertemplate=f"%{{y:,.1f}} {of_line}",
        )
    figure.update_yaxes(title=unit)
    return over_time(figure, at_s)


def clock(samples: queries.MachineSamples) -> Chart:
    """Mean and lowest clock rate of the cores, and the lowest of the GPUs."""
    return _lines(
        samples.at_s,
        {
            "mean of the cores": (samples.clock_mhz, "solid", "MHz"),
            "slowest core": (samples.lowest_clock_mhz, "dot", "MHz"),
            "GPU": (samples.gpu_clock_mhz, "dash", "MHz"),
        },
        "MHz",
    )


def load(samples: queries.MachineSamples) -> Chart:
    """Load average."""
    return _lines(samples.at_s, {"load, last minute": (samples.load_1m, "solid", "threads")}, "threads")


def warmth(samples: queries.MachineSamples) -> Chart:
    """Highest temperatures."""
    return _lines(
        samples.at_s,
        {
            "hottest sensor": (samples.temperature_c, "solid", "°C"),
            "GPU": (samples.gpu_temperature_c, "dash", "°C"),
        },
        "°C",
    )


def memory(samples: queries.MachineSamples) -> Chart:
    """Memory that programs can still take, and the GPUs' memory in use."""
    return _lines(
        samples.at_s,
        {
            "free memory": (samples.available_bytes / 1e9, "solid", "GB"),
            "VRAM in use": (samples.vram_used_bytes / 1e9, "dash", "GB"),
            "VRAM": (samples.vram_bytes / 1e9, "dot", "GB"),
        },
        "GB",
    )


def gpu_load(samples: queries.MachineSamples) -> Chart:
    """Share of the time in which the GPUs computed."""
    return _lines(samples.at_s, {"GPU": (samples.gpu_percent, "solid", "%")}, "%")


def gpu_power(samples: queries.MachineSamples) -> Chart:
    """Power of all GPUs."""
    return _lines(samples.at_s, {"GPU": (samples.gpu_power_w, "solid", "W")}, "W")
