"""Types of the native module `twofold._cuda`, in the order of the bindings' files (engine/bindings/cuda, device).

The fake device (tests/device) implements `Device` and its objects too. Addresses are integers, objects with data_ptr()
(torch's tensors) or None; streams are integers, cuda_stream. Every launch raises KernelError if the device refuses it.
"""

from collections.abc import Sequence
from typing import Final, TypedDict

from twofold import _core
from twofold._core import _Address
from twofold._core import device as launches

class DeviceDescription(TypedDict):
    index: int
    name: str
    compute_capability: int
    num_multiprocessors: int
    total_bytes: int
    l2_bytes: int
    can_map_host_memory: bool
    stream_memory_operations: bool

class DeviceFacts(TypedDict):
    """Sizes in bytes; link_gbps is the link's peak rate, 0 if unknown."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    link: str
    link_gbps: float

class UploadProbe(TypedDict):
    bytes: int
    us: float
    busy_us: float
    batches: int
    pinned: bool

class ServedStep(TypedDict):
    """done: whether the step finished; otherwise where it stopped, and why."""

    done: bool
    layer: int
    text: str

class HandshakeProbe(TypedDict):
    kind: str
    works: bool
    us: float
    why: str

class HandshakeProbes(TypedDict):
    """Probe results of every way to wait, and the chosen one: "" if none works."""

    probes: list[HandshakeProbe]
    kind: str
    reason: str

def devices() -> list[DeviceDescription]: ...

class Device:
    def facts(self) -> DeviceFacts: ...
    def probe_uploads(self) -> UploadProbe: ...
    def probe_handshakes(self) -> HandshakeProbes: ...

class StepServer:
    def serve(self) -> ServedStep: ...

class TableStep:
    """The host side of a table step."""

    def serve(self) -> ServedStep: ...
    def confirm(self) -> ServedStep: ...
