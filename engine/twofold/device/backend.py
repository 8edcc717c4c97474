"""The door to native device backends: the only module that imports one.

A backend is a native module with `devices`, `why_no_device` and `open_device`. Its `Device` launches the kernels; their
arguments are the frozen structs of `twofold._core.device`, which backends share. Another backend is another entry of
`_MODULES`, its device in this folder, and its C++ beside engine/runtime/cuda, engine/bindings/cuda and kernels/cuda.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from twofold import _cuda

_MODULES: Final = {"cuda": "twofold._cuda"}

# The stub of the CUDA module declares what all backends have.
NativeDevice: TypeAlias = "_cuda.Device"
DeviceDescription: TypeAlias = "_cuda.DeviceDescription"
LinkProbe: TypeAlias = "_cuda.LinkProbe"
ServedStep: TypeAlias = "_cuda.ServedStep"
StepServer: TypeAlias = "_cuda.StepServer"


class Backend(Protocol):
    """A native module that drives devices."""

    def devices(self) -> list[DeviceDescription]:
        """Usable devices."""

    def why_no_device(self) -> str:
        """Reason of the driver's library if `devices` is empty."""

    def open_device(self, index: int = 0) -> NativeDevice:
        """Raises KernelError if the device cannot be used."""


def load_backend(kind: str) -> Backend | None:
    """The backend of this kind; None if this build lacks it."""
    try:
        return cast("Backend", importlib.import_module(_MODULES[kind]))
    except ImportError:
        return None
