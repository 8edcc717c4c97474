"""Types of the native module `twofold._cuda`, in the order of the bindings' files (engine/bindings/cuda, device).

The fake device (tests/device) implements `Device` and its objects too. Addresses and streams are integers: torch's
data_ptr() and cuda_stream. Every launch raises KernelError if the device refuses it.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict, final

import numpy as np
from numpy.typing import NDArray

from twofold import _core
from twofold._core import device as launches

# ---- cuda/module.cpp

class DeviceDescription(TypedDict):
    index: int
    name: str
    compute_capability: int
    num_multiprocessors: int
    total_bytes: int
    l2_bytes: int
    can_map_host_memory: bool
    stream_memory_operations: bool

def open_device(index: int = 0) -> Device: ...
def devices() -> list[DeviceDescription]: ...
def why_no_device() -> str: ...

# ---- cuda/bind_dense.cpp: routing, rotation and KV store, decode attention

@final
class KvPages:
    """One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim]."""

    def __init__(
        self, *, keys: int, values: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> None: ...

@final
class QkvRows:
    """Projection rows for queries, keys and values, and their rotation."""

    def __init__(
        self,
        *,
        qkv: int,
        num_tokens: int,
        num_heads: int,
        q_norm: int,
        k_norm: int,
        epsilon: float,
        cos: int,
        sin: int,
        rotary: int,
        slot_mapping: int,
        v_norm: int = 0,
    ) -> None: ...

@final
class DecodeAttention:
    """One query per sequence, attending to its pages."""

    def __init__(
        self,
        *,
        q: int,
        page_tables: int,
        seq_lens: int,
        num_sequences: int,
        num_heads: int,
        max_pages: int,
        max_length: int,
        scale: float,
        window: int,
        sinks: int = 0,
        chunk: int = 0,
    ) -> None: ...

def route(
    logits: int,
    bias: int,
    num_tokens: int,
    num_experts: int,
    shape: _core.RouterShape,
    ids: int,
    weights: int,
    stream: int,
) -> None: ...
def rope_store(rows: QkvRows, pages: KvPages, *, q: int, stream: int) -> None: ...
def attention_workspace_bytes(
    *, num_sequences: int, num_heads: int, head_dim: int, max_length: int
) -> int: ...
def decode_attention(
    attention: DecodeAttention, pages: KvPages, *, workspace: int, out: int, stream: int
) -> None: ...

# ---- cuda/bind_mla.cpp: latent attention

@final
class MlaPages:
    """One layer's latents: bf16 [pages, page_size, latent + rope]."""

    def __init__(self, rows: int, page_size: int, latent: int, rope: int) -> None: ...

@final
class MlaRows:
    """Outputs of latent attention's projections, and their destination."""

    def __init__(
        self,
        *,
        compressed: int,
        stride: int,
        queries: int,
        num_tokens: int,
        num_heads: int,
        nope: int,
        norm: int,
        epsilon: float,
        cos: int,
        sin: int,
        neighbours: bool,
        slot_mapping: int,
    ) -> None: ...

@final
class MlaDecode:
    """One absorbed query per sequence and head."""

    def __init__(
        self,
        *,
        absorbed: int,
        page_tables: int,
        lengths: int,
        num_sequences: int,
        num_heads: int,
        max_pages: int,
        max_length: int,
        scale: float,
    ) -> None: ...

def mla_store(rows: MlaRows, pages: MlaPages, absorbed: int, stream: int) -> None: ...
def mla_workspace_bytes(num_sequences: int, num_heads: int, latent: int, max_length: int) -> int: ...
def mla_decode(decode: MlaDecode, pages: MlaPages, workspace: int, out: int, stream: int) -> None: ...

@final
class DeltaRecords:
    """One layer's records of gated delta nets."""

    def __init__(
        self,
        *,
        slabs: int,
        tail: int,
        num_k_heads: int,
        num_v_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
    ) -> None: ...

@final
class DeltaRows:
    """Outputs of a gated delta net's projections for tokens."""

    def __init__(
        self,
        *,
        projected: int,
        stride: int,
        conv: int,
        decay_rate: int,
        decay_bias: int,
        positions: int,
        records: int,
        num_sequences: int,
        num_tokens: int,
    ) -> None: ...

def delta(rows: DeltaRows, records: DeltaRecords, out: int, stream: int) -> None: ...

# ---- device/bind_device.cpp: memory, uploads; the rest of class Device is in the files after it

class DeviceFacts(TypedDict):
    """Sizes in bytes; link_gbps is the link's peak rate, 0 if unknown."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    link: str
    link_gbps: float

class UploadCounts(TypedDict):
    landed: int
    failed: int
    batches: int
    bytes: int
    busy_us: float
    held: int

class UploadProbe(TypedDict):
    bytes: int
    us: float
    busy_us: float
    batches: int
    pinned: bool

@final
class CudaAccelerator(_core.SlottedAccelerator):
    """Expert slots on a device, with uploads in real time. Addresses are device addresses."""

    @property
    def warning(self) -> str: ...
    @property
    def slot_base(self) -> int: ...
    @property
    def slot_stride(self) -> int: ...
    @property
    def slot_table(self) -> int: ...
    @property
    def store_base(self) -> int: ...
    def split_table(self) -> Sequence[int]: ...
    def read_prices(self) -> Sequence[int]: ...
    def before_compute(self, stream: int) -> None: ...
    def after_compute(self, stream: int) -> None: ...

@final
class LinkProbe:
    """Times copies from pinned memory to the device."""

    def copies_us(self, bytes: int, count: int = 1, asleep: bool = False) -> float: ...

@final
class Device:
    """A device and its kernels."""

    def facts(self) -> DeviceFacts: ...
    def accelerator(
        self, store: _core.ExpertStore, cost: _core.CostModel, config: _core.SchedulerConfig
    ) -> CudaAccelerator: ...
    def probe_uploads(self, store: _core.ExpertStore, num_uploads: int, demand: bool) -> UploadProbe: ...
    def link_probe(self, most_bytes: int) -> LinkProbe: ...
    # bind_experts.cpp
    def read_host(self, mapped: int, to: int, bytes: int, stream: int) -> None: ...
    def encode(self, rows: launches.EncodedRows, stream: int) -> None: ...
    def decode_experts(
        self,
        layout: launches.ExpertLayout,
        groups: launches.ExpertGroups,
        buffers: launches.ExpertBuffers,
        shape: launches.DecodeShape,
        stream: int,
    ) -> None: ...
    def prefill_experts(
        self,
        layout: launches.ExpertLayout,
        groups: launches.ExpertGroups,
        buffers: launches.ExpertBuffers,
        tiles: launches.PrefillTiles,
        rows: launches.PrefillRows,
        stream: int,
    ) -> None: ...
    def combine(self, layer: launches.CombinedLayer, stream: int) -> None: ...
    # bind_handshake.cpp
    def mailbox(self, shape: launches.MailboxShape) -> DeviceMailbox: ...
    def step_server(
        self, mailbox: DeviceMailbox, pool: _core.ThreadPool, store: _core.ExpertStore
    ) -> StepServer: ...
    def begin_step(self, step: int, stream: int) -> None: ...
    def place(
        self,
        routed: launches.RoutedLayer,
        tables: launches.PlacementTables,
        placed: launches.PlacedLayer,
        shape: launches.MailboxShape,
        *,
        mailbox: int,
        step: int,
        stream: int,
    ) -> None: ...
    def probe_handshakes(self, hidden: int, num_layers: int = 32, num_steps: int = 50) -> HandshakeProbes: ...
    # bind_table_step.cpp
    def table_step(
        self,
        mailbox: DeviceMailbox,
        executor: _core.MoeExecutor,
        accelerator: CudaAccelerator,
        pool: _core.ThreadPool,
    ) -> TableStep: ...

# ---- device/bind_handshake.cpp: memory that host and device share during a decode step

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

_Compute = Callable[
    [
        int,
        NDArray[np.int32],
        NDArray[np.float32],
        NDArray[np.uint8],
        NDArray[np.uint16],
        NDArray[np.float32],
    ],
    None,
]

@final
class DeviceMailbox:
    """Mapped memory shared by a decode graph and the CPU."""

    @property
    def address(self) -> int: ...
    @property
    def results(self) -> int: ...
    def wait(
        self, *, kind: str, layer: int, step: int, num_on_cpu: int, limit_s: float, stream: int
    ) -> None: ...
    def joined_ns(self, layer: int) -> int: ...
    def serve(self, step: int, limit_s: float, compute: _Compute) -> ServedStep: ...
    def abort(self) -> None: ...
    def reset(self) -> None: ...

@final
class StepServer:
    """The CPU side of decode graphs: experts of a store on a pool."""

    def serve(self, step: int, limit_s: float) -> ServedStep: ...

# ---- device/bind_table_step.cpp

@final
class TableStep:
    """The host side of a table step."""

    def begin(
        self,
        step: int,
        requests: Sequence[int],
        positions: Sequence[int],
        stream: int,
        generated: Sequence[bool] = (),
    ) -> None: ...
    def serve(self, number: int, limit_s: float) -> ServedStep: ...
    def end(self, stream: int) -> None: ...
    def confirm(self) -> ServedStep: ...
    def give_up(self, stream: int) -> None: ...
    @property
    def cpu_us(self) -> float: ...
