"""Describes the machine of a run for telemetry: processor, memory, versions, and the cost model's figures."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.api.types import TraceSizes
from twofold.blocks import ops
from twofold.experts.profiles import MachineProfile, load_machine_profile

_PACKAGES: Final = ("torch", "numpy", "tokenizers", "safetensors", "llguidance", "gguf")


def machine_json(
    pool: ops.ThreadPool,
    profile: MachineProfile | None,
    sizes: TraceSizes,
    slots: Sequence[int] = (),
) -> str:
    """The machine, the model's sizes and each device's expert slots as JSON. Without a `profile` that of `twofold
    calibrate`, if any."""
    found = profile or _calibrated()
    figures = (
        {} if found is None else {name: dataclasses.asdict(each) for name, each in found.figures.items()}
    )
    content: dict[str, Any] = {"system": _system(pool), "versions": _versions(), "profile": figures}
    content |= {"name": "" if found is None else found.name, "model_sizes": sizes, "slots": slots}
    if found is not None and found.joined:
        content["devices"] = {
            f"{number}: {device.name}": device.cost_figures for number, device in enumerate(found.devices)
        }
    return json.dumps(content)


def _calibrated() -> MachineProfile | None:
    try:
        return load_machine_profile(None)
    except ConfigError:  # a file of another version; who uses it hears of it
        return None


def _system(pool: ops.ThreadPool) -> dict[str, str]:
    cpu = re.search(r"^model name\s*: (.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"MemTotal:\s+(\d+) kB", _text("/proc/meminfo"))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} may be used",
        "threads": pool.reason,
        "memory": f"{int(memory[1]) * 1024 / 1e9:.1f} GB" if memory else "unknown",
        "NUMA nodes": f"{max(nodes, 1)}",
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _text(path: str) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
