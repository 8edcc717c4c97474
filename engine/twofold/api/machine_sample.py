"""The state of the machine at one moment, for telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class MachineSample:
    """State of the machine at one moment, as far as the operating system tells."""

    at_s: Annotated[float, "Unix time"]
    load_1m: Annotated[float, "load average of the last minute"]
    clock_mhz: Annotated[float | None, "mean over the cores"]
    lowest_clock_mhz: float | None
    temperature_c: Annotated[float | None, "highest of all sensors"]
    available_bytes: Annotated[int | None, "memory that programs can still take"]
    gpu_percent: Annotated[float | None, "mean over the GPUs: share of the time in which kernels ran"] = None
    gpu_clock_mhz: Annotated[float | None, "lowest clock of the GPUs' processors"] = None
    gpu_power_w: Annotated[float | None, "sum over the GPUs"] = None
    gpu_temperature_c: Annotated[float | None, "highest of the GPUs"] = None
    vram_used_bytes: Annotated[int | None, "sum over the GPUs"] = None
    vram_bytes: Annotated[int | None, "memory of the GPUs"] = None
