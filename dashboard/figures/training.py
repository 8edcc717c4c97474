"""Figures of a fine-tuning run, by optimiser step. See `base`."""

from __future__ import annotations

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.base import F64, layout, packed
from dashboard.figures.chart import Chart
from dashboard.palette import FAILED, QUANTITY, faint


def losses(steps: queries.TrainingSteps) -> Chart:
    """Loss of each step, and the held-out loss where it was evaluated."""
    figure = Chart()
    _line(figure, steps.step, steps.loss, name="loss", pattern="%{y:.4f}", color=faint(QUANTITY, 0.75))
    evaluated = ~np.isnan(steps.eval_loss)
    if evaluated.any():
        figure.add_scatter(
            x=packed(steps.step[evaluated]),
            y=packed(steps.eval_loss[evaluated]),
            name="held-out loss",
            mode="lines+markers",
            line={"color": FAILED, "width": 2.5},
            hovertemplate="%{y:.4f}",
        )
    return _by_step(figure, legend=True)


def one(step: F64, values: F64, *, name: str, pattern: str) -> Chart:
    """One quantity; `pattern` is Plotly's form of a value."""
    figure = Chart()
    _line(figure, step, values, name=name, pattern=pattern, color=QUANTITY)
    return _by_step(figure, legend=False)


def _line(figure: Chart, step: F64, values: F64, *, name: str, pattern: str, color: str) -> None:
    figure.add_scatter(
        x=packed(step),
        y=packed(values),
        name=name,
        mode="lines" if len(step) > 2 else "lines+markers",
        line={"color": color, "width": 2},
        hovertemplate=pattern,
    )


def _by_step(figure: Chart, *, legend: bool) -> Chart:
    figure = layout(figure, height=230, legend=legend)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title="step", nticks=7)
    figure.update_yaxes(rangemode="tozero")
    return figure
