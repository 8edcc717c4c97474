"""Machine page: what the run was made on, its ceilings and calibration, and how warm and fast it ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import machine as figures
from dashboard.figures.chart import Chart
from dashboard.parts import Shown
from dashboard.view import View

_Figure = tuple[str, str, Callable[[queries.MachineSamples], Chart], str, str]
_STATE: Final[list[_Figure]] = [
    (
        "clock",
        "Clock, MHz",
        figures.clock,
        "Mean and lowest clock rate of the processor's cores, and the lowest of the GPUs",
        "Falls under load: the processor throttles. Check cooling and power limits before tuning.",
    ),
    (
        "temperature",
        "Temperature, °C",
        figures.warmth,
        "Highest temperature of the machine, and of the GPUs",
        "Rises until the clock falls: cooling limits the speed.",
    ),
    (
        "load",
        "Load, threads that run or want to",
        figures.load,
        "Load average of the last minute",
        "Load above the number of threads: another process takes cores; layers then wait for it.",
    ),
    (
        "memory",
        "Memory, GB",
        figures.memory,
        "Memory that programs can still take, and the GPUs' memory in use",
        "Free memory near 0: weights are read from disk again; use a smaller format or model.",
    ),
]
"""Charts of the machine's state: key, title, figure, description and advice."""
_GPU: Final[list[_Figure]] = [
    (
        "gpu-load",
        "GPU in use, %",
        figures.gpu_load,
        "Share of the time in which kernels ran on the GPUs",
        "Low while requests run: the GPU waits for the CPU's experts or for the link.",
    ),
    (
        "gpu-power",
        "Power of the GPUs, W",
        figures.gpu_power,
        "Power that the GPUs take",
        "At the card's limit: its clock falls; raise the limit, or accept that speed.",
    ),
]


def body(view: View) -> None:
    run = view.run
    facts = queries.machine_facts(run)
    error = view.query(queries.estimate_error)
    parts.metrics(
        Shown("Twofold", run.version, "Version that wrote the run."),
        Shown("Instruction set", run.cpu_isa, "Level of the CPU kernels."),
        Shown("CPU threads", f"{run.cpu_threads:,}", "Threads that compute."),
        Shown(
            "Memory nodes", facts.system.get("NUMA nodes", formats.NOTHING), "NUMA nodes that threads span."
        ),
        Shown(
            "Prediction error",
            formats.percent(None if error is None else error.median),
            "Median of |predicted / measured − 1| over layers. Only real time can differ from the prediction.",
        ),
    )
    st.caption(f"Accelerator {run.accelerator}: {run.accelerator_reason}.")
    left, right = st.columns(2)
    with left, parts.card(left, "machine-1"):
        parts.table(["system", ""], [[*row] for row in facts.system.items()], name="System", texts=(0, 1))
        if not facts.system:
            parts.note("This run was recorded before machines were described.")
    with right, parts.card(right, "machine-2"):
        versions = {"twofold": run.version, **facts.versions}
        parts.table(["package", "version"], [[*row] for row in versions.items()], name="Versions")
    _ceilings(view, facts)
    _devices(facts)
    parts.devices(view, "machine-devices")
    _clocks(view)
    settings = {name: value for name, value in json.loads(run.config_json).items() if value is not None}
    with parts.card(st, "machine-5"):
        settings["model"] = formats.last_part(run.model)
        rows = [[name, str(value)] for name, value in settings.items()]
        parts.table(["setting", "value"], rows, name="Settings of the run", texts=(0, 1))


def _ceilings(view: View, facts: queries.MachineFacts) -> None:
    if not facts.profile:
        st.caption("Ceilings are unknown: `twofold calibrate` measures those of this machine.")
        return
    with parts.card(st, "machine-4"):
        rows = [
            [*formats.named_figure(name, float(figure["value"])), str(figure["source"])]
            for name, figure in facts.profile.items()
        ]
        parts.table(
            ["figure", "value", "source"],
            rows,
            name="Ceilings and costs that plans are priced with",
            texts=(0, 2),
        )
        st.caption("A source that is not a measurement of this machine: run `twofold calibrate`.")


def _devices(facts: queries.MachineFacts) -> None:
    """Figures of each device, where there are several."""
    if not facts.devices:
        return
    with parts.card(st, "machine-6"):
        figures = list(next(iter(facts.devices.values())))
        rows = [
            [
                formats.named_figure(name, 0)[0],
                *(formats.named_figure(name, device[name])[1] for device in facts.devices.values()),
            ]
            for name in figures
        ]
        parts.table(["figure", *facts.devices], rows, name="Figures of each device")


def _clocks(view: View) -> None:
    samples = view.query(queries.machine_samples, view.span)
    if not len(samples.at_s):
        st.caption("No state of the machine in this window: choose a longer one, or the run is older.")
        return
    shown = [*_STATE, *(_GPU if samples.has_gpu else [])]
    for first in range(0, len(shown), 2):
        for place, (key, title, figure, alt, advice) in zip(
            st.columns(2), shown[first : first + 2], strict=True
        ):
            with parts.card(place, f"machine-{key}", title):
                chart = figure(samples)
                if chart.is_empty():
                    parts.note("This system does not tell it.")
                else:
                    parts.chart(chart, key=key, alt=alt, advice=advice)


frame.live_page(
    "Machine",
    "What the run was made on: processor, memory, versions, ceilings, and the figures that plans are priced with.",
    body,
    kind=None,
)
