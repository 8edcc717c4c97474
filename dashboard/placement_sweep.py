"""The figure of `benchmarks placement`, if TWOFOLD_PLACEMENT_SWEEP names its CSV."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import streamlit as st

from dashboard import parts
from dashboard.figures import base
from dashboard.figures.chart import Chart

VARIABLE: Final = "TWOFOLD_PLACEMENT_SWEEP"
_MAX_ROWS: Final = 10_000
_DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

Lines = dict[str, list[tuple[float, float]]]
"""Points (share of experts in slots, decoded tokens per second) by strategy."""


def read_sweep(path: Path) -> dict[str, Lines]:
    """Lines by "model on machine". Raises ValueError if it is no such file, OSError if it cannot be read."""
    found: dict[str, Lines] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                where, strategy = f"{row['model']} on {row['profile']}", row["strategy"]
                point = float(row["ratio"]), float(row["decode_tokens_per_s"])
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"row {number + 1} is not from `benchmarks placement`: {str(row)[:200]}"
                ) from None
            if number >= _MAX_ROWS or not all(map(math.isfinite, point)):
                raise ValueError(f"row {number + 1}: at most {_MAX_ROWS} rows of finite numbers are shown")
            found.setdefault(where, {}).setdefault(strategy, []).append(point)
    if not found:
        raise ValueError("it holds no rows")
    return found


def figure(lines: Mapping[str, list[tuple[float, float]]]) -> Chart:
    """Speed against the share of experts in slots, one line per strategy."""
    made = Chart()
    for number, (strategy, points) in enumerate(lines.items()):
        made.add_scatter(
            x=[100 * share for share, _ in points],
            y=[speed for _, speed in points],
            name=strategy,
            mode="lines+markers",
            line={"width": 2, "dash": _DASHES[number % len(_DASHES)]},
            hovertemplate="%{y:,.1f} tokens/s",
        )
    made.update_layout(hovermode="x unified")
    made.update_xaxes(title="experts in slots, %")
    made.update_yaxes(title="decode tokens/s", rangemode="tozero")
    return base.layout(made, height=360, legend=True)


def card() -> None:
    """Add the figure to the current page; nothing if no file is named."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    with parts.card(st, "placement-sweep", "Strategies compared (emulated machines, virtual clock)"):
        try:
            found = read_sweep(Path(name))
        except (OSError, ValueError) as error:
            st.info(f"{VARIABLE}={name} is not shown: {error}", icon=":material/error:")
            return
        where = st.selectbox("Model and machine", list(found), key="sweep")
        parts.chart(
            figure(found[where]),
            key="sweep-figure",
            alt="Decoding speed of each strategy against the share of experts in slots",
            advice="Choose the strategy whose line is highest at the share of experts that your GPU holds.",
        )
