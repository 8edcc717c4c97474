"""The machine that a run was recorded on, as the engine described it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run, Window

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MachineFacts:
    """Sections of `run.machine_json`; empty where the run has none."""

    system: Mapping[str, str] = field(default_factory=dict)
    """Processor, cores, memory, NUMA nodes, kernel."""
    versions: Mapping[str, str] = field(default_factory=dict)
    profile: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures of the cost model by name: value and source. Those of the first device, if there are several."""
    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Figures of each device by its name, if there are several."""

    @property
    def read_gb_per_s(self) -> float | None:
        """Most bytes that all threads read from memory per second, in GB/s; None if not recorded."""
        figure = self.profile.get("cpu_bandwidth_gbps")
        return None if figure is None else float(figure["value"])


def machine_facts(run: Run) -> MachineFacts:
    """The machine that the engine recorded."""
    stored = json.loads(run.machine_json)
    return MachineFacts(**{each.name: stored.get(each.name, {}) for each in fields(MachineFacts)})


@dataclass(frozen=True)
class MachineSamples:
    """States of the machine over time; arrays are [samples], NaN where the system tells nothing."""

    at_s: F64
    load_1m: F64
    clock_mhz: F64
    lowest_clock_mhz: F64
    temperature_c: F64
    available_bytes: F64
    gpu_percent: F64
    gpu_clock_mhz: F64
    gpu_power_w: F64
    gpu_temperature_c: F64
    vram_used_bytes: F64
    vram_bytes: F64

    @property
    def has_gpu(self) -> bool:
        """Whether a GPU told anything."""
        return not np.isnan([self.gpu_percent, self.gpu_power_w, self.vram_used_bytes]).all()


def machine_samples(db: Database, run: Run, span: Window, *, max_samples: int = 1000) -> MachineSamples:
    """The samples of a window, evenly thinned to at most `max_samples`."""
    table = schema.machine_sample.c
    names = [field.name for field in fields(MachineSamples)]
    query = (
        select(*(table[name] for name in names))
        .where(table.run_id == run.run_id, table.at_s >= span.begin_s, table.at_s < span.end_s)
        .order_by(table.at_s)
    )
    rows = np.array([tuple(row) for row in db.rows(query)], np.float64).reshape(-1, len(names))
    rows = rows[:: max(1, -(-len(rows) // max_samples))]
    return MachineSamples(*(np.ascontiguousarray(column) for column in rows.T))
