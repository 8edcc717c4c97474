"""Chooses, once, which accelerator runs experts besides the CPU, gives the reason, and opens a real device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twofold.api.errors import ConfigError
from twofold.device.backend import DeviceDescription, load_backend
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.profiles import load_profile, shipped_profiles

if TYPE_CHECKING:
    from twofold.device.device import Device

_NO_MODULE: Final = "this build has no CUDA module"


def choose_accelerator(name: str) -> tuple[AcceleratorChoice, Device | None]:
    """Resolve `--accelerator`; the device is returned where the choice is "cuda". Emulation only on request.

    Raises:
        ConfigError: unknown name, or cuda was requested and is not available.
    """
    if name.startswith("emulated:"):
        profile = load_profile(name.removeprefix("emulated:"))
        reason = f"asked for; times are those of {profile.description}"
        return AcceleratorChoice("emulated", reason, profile), None
    if name == "none":
        return AcceleratorChoice("none", "asked for"), None
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"--accelerator was given {name!r}; it takes auto, cuda, none or emulated:PROFILE with PROFILE one of "
            f"{', '.join(shipped_profiles())}"
        )
    device, missing = find_device()
    if device is not None:
        return on_device(device, "a CUDA device is there"), device
    if name == "cuda":
        raise ConfigError(f"--accelerator cuda: {missing}; use auto, none or emulated:PROFILE")
    return AcceleratorChoice("none", missing), None


def on_device(device: Device, reason: str) -> AcceleratorChoice:
    """The choice to run experts on this device."""
    return AcceleratorChoice("cuda", reason, open_device=lambda: device.native)


def find_device() -> tuple[Device | None, str]:
    """(device, ""), or (None, the reason why none is usable)."""
    found, why = cuda_devices()
    if not found:
        return None, why if why == _NO_MODULE else "no CUDA device was found"
    import torch  # computes the dense layers; slow to import, so only with a device

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} does not use CUDA; install one that does"
    from twofold.device.cuda_device import CudaDevice

    return CudaDevice(), ""


def cuda_devices() -> tuple[list[DeviceDescription], str]:
    """Devices that the CUDA backend finds, and the reason if it finds none."""
    backend = load_backend("cuda")
    return ([], _NO_MODULE) if backend is None else (backend.devices(), backend.why_no_device())
