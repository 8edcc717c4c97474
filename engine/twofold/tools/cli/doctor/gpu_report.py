"""`twofold doctor --gpu`: the long form of the self-check, and the report file to send.

The report holds no path but the model's, no prompt and no name of the machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold import __version__
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, TwofoldError

if TYPE_CHECKING:
    from twofold.device.checks.self_check import SelfCheck
    from twofold.device.device import Device

_WHERE: Final = "an issue of Twofold's repository"
REPORT: Final = Path("twofold-gpu-report.json")


def run(config: EngineConfig, *, as_json: bool) -> int:
    """Check each device that the settings choose, print the results and write REPORT. 0 if no check failed.

    Raises:
        ConfigError: there is no device, or the report cannot be written.
        ModelLoadError: the model cannot be used.
    """
    from twofold.blocks import ops
    from twofold.device.checks.self_check import check_device
    from twofold.device.finding import cuda_indices, find_device
    from twofold.models.model_files import open_model_files

    indices = cuda_indices(config) or (0,)
    devices: list[Device] = []
    for index in indices:
        device, why = find_device(index)
        if device is None:
            raise ConfigError(f"--gpu: {why}; there is nothing to check")
        devices.append(device)
    files = open_model_files(config.model)
    pool = ops.ThreadPool(config.cpu_threads, config.numa)
    found = [
        check_device(device, files, pool, name=f"cuda:{index}", long=True)
        for device, index in zip(devices, indices, strict=True)
    ]
    report = _report(config, devices, found)
    try:
        REPORT.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--gpu: {REPORT.absolute()} cannot be written ({error.strerror})") from error
    if as_json:
        print(json.dumps(report, default=str))
    else:
        print(*_lines(found), sep="\n")
    return 0 if all(each.failed is None for each in found) else 1


def _lines(found: list[SelfCheck]) -> Iterator[str]:
    for each in found:
        yield each.device
        for result in each.results:
            yield f"{result.state:<8} {result.name}{f': {result.problem}' if result.problem else ''}"
    yield f"\nwritten: {REPORT.absolute()}; if a check failed, attach this file to {_WHERE}"


def _report(config: EngineConfig, devices: list[Device], found: list[SelfCheck]) -> dict[str, Any]:
    from twofold.blocks import ops
    from twofold.device.finding import cuda_devices

    return {
        "send_to": f"attach this file to {_WHERE}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "twofold": __version__,
        "torch": _version("torch"),
        "cuda_of_torch": _cuda_of_torch(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_isa": ops.isa_choice()[0],
        "model": Path(config.model).name,
        "driver": _driver(),
        "cards": cuda_devices()[0],
        "devices": [
            {
                "name": each.device,
                "facts": _facts(device),
                "checks": list(map(dataclasses.asdict, each.results)),
            }
            for device, each in zip(devices, found, strict=True)
        ],
    }


def _facts(device: Device) -> dict[str, Any]:
    try:
        return dict(device.native.facts())
    except TwofoldError as error:
        return {"error": str(error)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    import torch

    return torch.version.cuda


def _driver() -> str:
    """Version of the NVIDIA driver, as its module in the system's kernel tells it; "" without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
