"""What pages show of a run whose experts all run on the CPU: the bandwidth reached, and its calibrated ceiling."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, parts
from dashboard.figures import scheduler
from dashboard.parts import Shown
from dashboard.view import View
from dashboard.window_rows import WindowRows


def explain(what: str) -> None:
    """Say why the page's charts do not apply."""
    st.info(
        f"{what} Memory bandwidth limits decoding here: every routed expert's weights are read from host memory.",
        icon=":material/memory:",
    )


def bandwidth(view: View, found: WindowRows) -> None:
    """Cards of the bandwidth that the CPU's experts reached, by time and by layer."""
    costs = queries.run_costs(view.run)
    ceiling = None if costs is None else costs.cpu_bandwidth_gbps
    reached = found.cpu.gbps
    if reached != reached:
        parts.note("No decode step with experts on the CPU in this window.")
        return
    parts.metrics(
        Shown(
            "Expert weights read",
            f"{reached:.1f} GB/s",
            "Bytes of distinct experts per second of the CPU's expert time, decode steps.",
            f"median layer {np.nanmedian(found.cpu.by_layer):.1f} GB/s",
        ),
        Shown(
            "Of the ceiling", formats.percent(reached / ceiling if ceiling else None), "Calibrated bandwidth."
        ),
        Shown("Threads", f"{view.run.cpu_threads}", "Threads that compute, --cpu-threads."),
        Shown("Instruction set", view.run.cpu_isa),
        key="figures-cpu",
    )
    left, right = st.columns(2)
    with parts.card(left, "cpu-1", "Bandwidth of experts on the CPU, GB/s"):
        missing = (
            "" if ceiling else "No ceiling is drawn: this machine was not calibrated (twofold calibrate)."
        )
        parts.chart(
            scheduler.cpu_bandwidth(found.cpu, ceiling=ceiling),
            key="cpu-bandwidth",
            alt="Bandwidth of expert weights over time, and the calibrated ceiling",
            advice="Far below the ceiling: try --cpu-threads and --numa, and look for other processes.",
            note=missing,
        )
    with parts.card(right, "cpu-2", "Bandwidth by layer, GB/s"):
        parts.chart(
            scheduler.cpu_bandwidth_by_layer(found.cpu),
            key="cpu-layers",
            alt="Median bandwidth of each layer",
            advice="One low layer among equals: its weights may lie on another NUMA node or be paged out.",
        )
