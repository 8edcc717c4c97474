"""The door to native device backends: the only module that imports one.

A backend is a native module with `devices`, `why_no_device` and `open_device`. Its `Device` launches the kernels; their
arguments are the frozen structs of `twofold._core.device`, which backends share. Another backend is another entry of
`_MODULES`, its device in this folder, and its C++ beside engine/runtime/cuda, engine/bindings/cuda and kernels/cuda.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from twofold import _core

if TYPE_CHECKING:
    from twofold import _cuda

_MODULES: Final = {"cuda": "twofold._cuda"}

# The stub of the CUDA module declares what all backends have.
NativeDevice: TypeAlias = "_cuda.Device"
DeviceDescription: TypeAlias = "_cuda.DeviceDescription"
HandshakeProbes: TypeAlias = "_cuda.HandshakeProbes"
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


def load_backend(kind: str) -> tuple[Backend | None, str]:
    """(backend of this kind, ""), or (None, why this installation has none and what to do)."""
    module = _MODULES[kind]
    try:
        return cast("Backend", importlib.import_module(module)), ""
    except ModuleNotFoundError as error:
        if error.name == module:
            return None, _left_out(kind)
        return None, _broken(module, error)
    except ImportError as error:
        return None, _broken(module, error)


def _left_out(kind: str) -> str:
    """Why the build left the backend out, as cmake/Cuda.cmake wrote it beside the native module."""
    reason = Path(_core.__file__).with_name(f"{kind}_missing.json")
    text = f"this build has no {kind.upper()} module"
    if not reason.is_file():
        return f"{text}; build it on this machine"
    found = json.loads(reason.read_text(encoding="utf-8"))
    return f"{text}: {found['problem']}; {found['remedy']}"


def _broken(module: str, error: ImportError) -> str:
    return f"{module} is there but cannot be imported ({error}); install or build it again"
