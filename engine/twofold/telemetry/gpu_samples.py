"""Reads load, clock, power, temperature and memory of NVIDIA's GPUs with NVML, if the package nvidia-ml-py is there.

Without the package, a driver or a GPU there are no figures. A figure that a GPU does not tell is None.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuSample:
    """All GPUs of the machine together; see `MachineSample`."""

    gpu_percent: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None
    vram_used_bytes: int | None = None
    vram_bytes: int | None = None


@functools.cache
def _nvml() -> tuple[Any, tuple[Any, ...]]:
    """NVML and its devices, opened once; no device where there is no NVML."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, tuple(
            nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())
        )
    except Exception:  # no package, no driver, or one that it does not know
        return None, ()


def read() -> GpuSample:
    """The GPUs' state now."""
    nvml, devices = _nvml()
    if not devices:
        return GpuSample()

    def of_each(ask: Callable[[Any], float]) -> list[float]:
        found = []
        for device in devices:
            with contextlib.suppress(Exception):  # NVMLError_NotSupported, or a device that is gone
                found.append(float(ask(device)))
        return found

    percent = of_each(lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu)
    clocks = of_each(lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
    power_mw = of_each(nvml.nvmlDeviceGetPowerUsage)
    degrees = of_each(lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))
    return GpuSample(
        gpu_percent=sum(percent) / len(percent) if percent else None,
        gpu_clock_mhz=min(clocks, default=None),
        gpu_power_w=sum(power_mw) / 1e3 if power_mw else None,
        gpu_temperature_c=max(degrees, default=None),
        vram_used_bytes=_sum(of_each(lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used)),
        vram_bytes=_sum(of_each(lambda device: nvml.nvmlDeviceGetMemoryInfo(device).total)),
    )


def _sum(numbers: Sequence[float]) -> int | None:
    return int(sum(numbers)) if numbers else None
