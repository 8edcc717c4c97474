"""Chooses, once, which accelerator runs experts besides the CPU, gives the reason, and opens real devices."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.backend import DeviceDescription, load_backend
from twofold.device.memory.budget import DeviceMemory
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.profiles import load_profile, shipped_profiles
from twofold.experts.unused_gpu import no_accelerator, no_device_found, not_used, without_torch_cuda

if TYPE_CHECKING:
    from twofold.device.device import Device


def choose_accelerator(
    name: str, indices: Sequence[int] = ()
) -> tuple[AcceleratorChoice, tuple[Device, ...]]:
    """Resolve `--accelerator`; devices are returned where the choice is "cuda". Emulation only on request.

    indices: requested CUDA devices, the main one first; empty: the first one if there is one.

    Raises:
        ConfigError: unknown name, or cuda or a device was requested and is not available.
    """
    if name.startswith("emulated:"):
        profile = load_profile(name.removeprefix("emulated:"))
        reason = f"asked for; times are those of {profile.description}"
        return AcceleratorChoice("emulated", reason, profile), ()
    if name == "none":
        return AcceleratorChoice("none", "asked for"), ()
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"--accelerator was given {name!r}; it takes auto, cuda, none or emulated:PROFILE with PROFILE one of "
            f"{', '.join(shipped_profiles())}"
        )
    devices: list[Device] = []
    for index in indices or (0,):
        device, missing = find_device(index)
        if device is None:
            requested = f"--devices cuda:{index}" if indices else "--accelerator cuda"
            if indices or name == "cuda":
                raise ConfigError(f"{requested}: {missing}; use auto, none or emulated:PROFILE")
            return no_accelerator(missing), ()
        devices.append(device)
    names = ", ".join(f"cuda:{index}" for index in indices)
    reason = f"asked for: {names}" if len(devices) > 1 else "a CUDA device is there"
    return on_devices(devices, reason, indices), tuple(devices)


def cuda_indices(config: EngineConfig) -> tuple[int, ...]:
    """Indices of the GPUs to use, the main one first; empty: as --accelerator says.

    Raises:
        ConfigError: --devices, --split-mode or --main-gpu cannot be met.
    """
    if config.devices is None:
        given = (
            "--main-gpu" if config.main_gpu else "--split-mode none" if config.split_mode == "none" else ""
        )
        if given and config.accelerator.startswith("emulated:"):
            raise ConfigError(
                f"{given} was given with --accelerator {config.accelerator}, whose first card is the main one; give "
                "the cards in another order"
            )
        if given:
            raise ConfigError(
                f"{given} was given without --devices; name the GPUs, such as --devices cuda:0,cuda:1"
            )
        return ()
    found = [
        re.fullmatch(r"cuda:?(\d{1,3})", name.strip(), re.IGNORECASE) for name in config.devices.split(",")
    ]
    indices = [int(match[1]) for match in found if match is not None]
    if len(set(indices)) < len(found):
        raise ConfigError(
            f"--devices was given {config.devices!r}; expected GPUs such as cuda:0,cuda:1, each of them once"
        )
    if config.accelerator not in ("auto", "cuda"):
        raise ConfigError(
            f"--devices {config.devices} was given with --accelerator {config.accelerator}; leave one of them out"
        )
    if config.main_gpu >= len(indices):
        raise ConfigError(
            f"--main-gpu was given {config.main_gpu}; --devices {config.devices} has {len(indices)}, counted from 0"
        )
    main = indices.pop(config.main_gpu)
    return (main,) if config.split_mode == "none" else (main, *indices)


def on_devices(devices: Sequence[Device], reason: str, indices: Sequence[int] = ()) -> AcceleratorChoice:
    """The choice to run experts on these devices."""
    names = tuple(f"cuda:{index}" for index in indices or range(len(devices)))
    return AcceleratorChoice(
        "cuda", reason, open_devices=lambda: [device.native for device in devices], devices=names
    )


def without_devices(config: EngineConfig, problem: str) -> AcceleratorChoice:
    """The choice to go on without devices, because of `problem`.

    Raises:
        ConfigError: the devices were asked for.
    """
    if not may_leave_devices(config):
        requested = "--accelerator cuda" if config.devices is None else f"--devices {config.devices}"
        raise ConfigError(f"{requested}: {problem}; --accelerator auto goes on with the CPU")
    return not_used(problem)


def keep_for_ever(thing: object) -> None:
    """Never free this object: freeing memory of a device that failed may wait for ever, or end the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def may_leave_devices(config: EngineConfig) -> bool:
    """Whether the CPU may compute what devices were chosen for: the user asked for none of them."""
    return config.accelerator == "auto" and config.devices is None


def find_device(index: int = 0) -> tuple[Device | None, str]:
    """(device, ""), or (None, the reason why it is not usable)."""
    found, why = cuda_devices()
    if not found:
        return None, why
    if index not in (there := [device["index"] for device in found]):
        names = ", ".join(f"cuda:{each}" for each in there)
        return None, f"there is no such device, only {names}"
    import torch  # computes the dense layers; slow to import, so only with a device

    if not torch.cuda.is_available():
        return None, without_torch_cuda(torch.__version__, torch.version.cuda)
    from twofold.device.cuda_device import CudaDevice

    return CudaDevice(index), ""


def device_memories(devices: Sequence[Device]) -> list[DeviceMemory]:
    """Memory of each device, as it reports it."""
    facts = [device.native.facts() for device in devices]
    return [DeviceMemory(each["total_bytes"], each["free_bytes"]) for each in facts]


def cuda_devices() -> tuple[list[DeviceDescription], str]:
    """Devices that the CUDA backend finds, and the reason if it finds none."""
    backend, missing = load_backend("cuda")
    if backend is None:
        return [], missing
    devices = backend.devices()
    return devices, "" if devices else no_device_found(backend.why_no_device())
