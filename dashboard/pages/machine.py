"""Machine page: what the run was made on, its ceilings and calibration, and how warm and fast it ran."""

from __future__ import annotations

import json

import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import machine as figures
from dashboard.parts import Shown
from dashboard.view import View


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
            [name.replace("_", " "), f"{figure['value']:,g}", str(figure["source"])]
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
            [name.replace("_", " "), *(f"{device[name]:,g}" for device in facts.devices.values())]
            for name in figures
        ]
        parts.table(["figure", *facts.devices], rows, name="Figures of each device")


def _clocks(view: View) -> None:
    samples = view.query(queries.machine_samples, view.span)
    if not len(samples.at_s):
        st.caption(
            "No clock rate or temperature in this window: this system tells none, or the run is older."
        )
        return
    left, right = st.columns(2)
    with parts.card(left, "machine-clock", "Processor clock, MHz"):
        parts.chart(
            figures.clock(samples),
            key="clock",
            alt="Mean and lowest clock rate of the processor's cores",
            advice="Falls under load: the processor throttles. Check cooling and power limits before tuning.",
        )
    with parts.card(right, "machine-temperature", "Temperature, °C, and load"):
        parts.chart(
            figures.warmth(samples),
            key="temperature",
            alt="Highest temperature and the one-minute load average",
            advice="Load above the number of threads: another process takes cores; layers then wait for it.",
        )


frame.live_page(
    "Machine",
    "What the run was made on: processor, memory, versions, ceilings, and the figures that plans are priced with.",
    body,
    kind=None,
)
