"""Layers that took many times the median of their layer, and the likely cause by the kernel's counters."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, parts
from dashboard.explanation import SLOW, cause
from dashboard.view import View
from dashboard.window_rows import WindowRows


def card(view: View, found: WindowRows) -> None:
    """List the slowest layers of the window's decode steps; nothing on an emulated clock, which no process disturbs."""
    if view.run.emulated:
        return
    with parts.card(st, "slow-layers", f"Layers that took {SLOW:.0f} times their median and more"):
        slow = queries.slow_layers(found.rows, at_least=SLOW)
        if not slow:
            st.markdown("None in these steps.")
            return
        counters = view.query(queries.step_counters, tuple(sorted({each.step for each in slow})))
        rows = "".join(_row(each, counters.get(each.step)) for each in slow)
        head = "".join(f"<th>{name}</th>" for name in ("layer", "time", "its median", "times"))
        parts.wide(
            f'<table class="tf-layers"><thead><tr><th>step</th>{head}<th class="tf-experts">likely cause</th>'
            f"</tr></thead><tbody>{rows}</tbody></table>",
            "Slow layers",
        )
        st.html(
            '<p class="tf-advice"><b aria-hidden="true">→</b> Another process: give the server its own cores '
            "(--cpu-threads, taskset), and compare with the machine's load.</p>"
        )


def _row(slow: queries.SlowLayer, counters: queries.StepCounters | None) -> str:
    return (
        f"<tr><td>{slow.step}</td><td>{slow.layer}</td><td>{formats.microseconds(slow.layer_us)}</td>"
        f"<td>{formats.microseconds(slow.median_us)}</td><td>{slow.ratio:,.0f}</td>"
        f'<td class="tf-experts">{cause(counters)}</td></tr>'
    )
