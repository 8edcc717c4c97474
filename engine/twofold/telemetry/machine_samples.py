"""Reads the machine's clock rate, temperature, load and free memory from Linux's files, and its GPUs from NVML.

Missing figures are None.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

from twofold.api.machine_sample import MachineSample
from twofold.telemetry import gpu_samples

_MAX_SENSORS: Final = 64


def read(now_s: float, root: Path = Path("/")) -> MachineSample:
    """The state at Unix time now_s; `root` holds `proc` and `sys`."""
    clocks = _clocks_mhz(root)
    temperatures = [each / 1000 for each in _numbers(root, "sys/class/thermal/thermal_zone*/temp")]
    temperatures += [each / 1000 for each in _numbers(root, "sys/class/hwmon/hwmon*/temp*_input")]
    load = _text(root / "proc/loadavg").split()
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return MachineSample(
        at_s=now_s,
        load_1m=float(load[0]) if load else 0.0,
        clock_mhz=sum(clocks) / len(clocks) if clocks else None,
        lowest_clock_mhz=min(clocks, default=None),
        temperature_c=max((each for each in temperatures if 0 < each < 150), default=None),
        available_bytes=int(available[1]) * 1024 if available else None,
        **vars(gpu_samples.read()),
    )


def _clocks_mhz(root: Path) -> list[float]:
    """Clock rates of the cores: what the frequency driver reports, else /proc/cpuinfo."""
    scaled = _numbers(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    if scaled:
        return [each / 1000 for each in scaled]
    return [
        float(each)
        for each in re.findall(r"^cpu MHz\s*: ([\d.]+)", _text(root / "proc/cpuinfo"), re.MULTILINE)
    ]


def _numbers(root: Path, pattern: str) -> list[float]:
    found = []
    for path in sorted(root.glob(pattern))[:_MAX_SENSORS]:
        with contextlib.suppress(ValueError):
            found.append(float(_text(path)))
    return found


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
