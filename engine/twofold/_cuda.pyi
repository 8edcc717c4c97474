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

class LinkProbe:
    """Times copies from pinned memory to the device."""

    def copies_us(self, bytes: int, count: int = 1, asleep: bool = False) -> float:
        """The device's time for copies in one call; waits for them."""

class Device:
    """A device and its kernels."""

    def facts(self) -> DeviceFacts:
        """Sizes in bytes; link_gbps is what the link carries at most, 0 where unknown."""

    def accelerator(
        self,
        store: _core.ExpertStore,
        cost: _core.CostModel,
        config: _core.SchedulerConfig,
        others: Sequence[Device] = (),
    ) -> _core.DeviceAccelerator:
        """Pins the store where it can and takes the slots' memory, on this device and `others`."""

    def probe_uploads(self, store: _core.ExpertStore, num_uploads: int, demand: bool) -> UploadProbe:
        """Uploads of the store's experts by an upload engine of its own: bytes, us, busy_us, batches, pinned."""

    def link_probe(self, most_bytes: int) -> LinkProbe: ...
    def route(
        self,
        *,
        logits: _Address,
        bias: _Address,
        num_tokens: int,
        num_experts: int,
        shape: _core.RouterShape,
        ids: _Address,
        weights: _Address,
        stream: _Address,
    ) -> None: ...
    def rope_store(
        self, rows: launches.QkvRows, pages: launches.KvPages, *, q: _Address, stream: _Address
    ) -> None: ...
    def decode_attention(
        self,
        attention: launches.DecodeAttention,
        pages: launches.KvPages,
        *,
        workspace: _Address,
        out: _Address,
        stream: _Address,
    ) -> None: ...
    def mla_store(
        self, rows: launches.MlaRows, pages: launches.MlaPages, *, absorbed: _Address, stream: _Address
    ) -> None: ...
    def mla_decode(
        self,
        decode: launches.MlaDecode,
        pages: launches.MlaPages,
        *,
        workspace: _Address,
        out: _Address,
        stream: _Address,
    ) -> None: ...
    def index_store(
        self, rows: launches.IndexRows, pages: launches.IndexPages, *, rotated: _Address, stream: _Address
    ) -> None: ...
    def index_pool(
        self, pools: launches.IndexPools, pages: launches.IndexPages, *, stream: _Address
    ) -> None: ...
    def index_choose(
        self, choice: launches.IndexChoice, pages: launches.IndexPages, *, scores: _Address, stream: _Address
    ) -> None: ...
    def delta(
        self, rows: launches.DeltaRows, records: launches.DeltaRecords, *, out: _Address, stream: _Address
    ) -> None: ...
    @staticmethod
    def attention_workspace_bytes(
        *, num_sequences: int, num_heads: int, head_dim: int, max_length: int
    ) -> int: ...
    @staticmethod
    def mla_workspace_bytes(*, num_sequences: int, num_heads: int, latent: int, max_length: int) -> int: ...
    def expert_stream(
        self, store: _core.ExpertStore, link_latency_us: float, link_bandwidth_gbps: float
    ) -> ExpertStream:
        """Pins the store where it can. The link's figures are a beginning: it learns the real ones."""

    def read_host(self, mapped: _Address, to: _Address, bytes: int, stream: _Address) -> None:
        """Mapped host memory to device memory, by a kernel."""

    def encode(self, rows: launches.EncodedRows, stream: _Address) -> None: ...
    def decode_experts(
        self,
        layout: launches.ExpertLayout,
        groups: launches.ExpertGroups,
        buffers: launches.ExpertBuffers,
        shape: launches.DecodeShape,
        stream: _Address,
    ) -> None: ...
    def prefill_experts(
        self,
        layout: launches.ExpertLayout,
        groups: launches.ExpertGroups,
        buffers: launches.ExpertBuffers,
        tiles: launches.PrefillTiles,
        rows: launches.PrefillRows,
        stream: _Address,
    ) -> None: ...
    def low_rank_gather(
        self,
        table: launches.LowRankTable,
        rows: launches.AdaptedRows,
        ids: _Address,
        t: _Address,
        stream: _Address,
    ) -> None: ...
    def low_rank_down(
        self,
        table: launches.LowRankTable,
        rows: launches.AdaptedRows,
        input: launches.LowRankInput,
        t: _Address,
        stream: _Address,
    ) -> None: ...
    def low_rank_up(
        self,
        table: launches.LowRankTable,
        rows: launches.AdaptedRows,
        t: _Address,
        output: launches.LowRankOutput,
        stream: _Address,
    ) -> None: ...
    def combine(self, layer: launches.CombinedLayer, stream: _Address) -> None: ...
    def begin_step(self, step: _Address, stream: _Address) -> None:
        """Counts the step."""

    def place(
        self,
        routed: launches.RoutedLayer,
        tables: launches.PlacementTables,
        placed: launches.PlacedLayer,
        shape: launches.MailboxShape,
        *,
        mailbox: _Address,
        step: _Address,
        stream: _Address,
    ) -> None:
        """Groups a layer's pairs and posts them to the mailbox; 0: posts nothing."""

    def mailbox(self, shape: launches.MailboxShape) -> DeviceMailbox: ...
    def step_server(
        self, mailbox: DeviceMailbox, pool: _core.ThreadPool, store: _core.ExpertStore
    ) -> StepServer: ...
    def probe_handshakes(self, hidden: int, num_layers: int = 32, num_steps: int = 50) -> HandshakeProbes:
        """Measures the ways to hand a layer over, and chooses."""

    def table_step(
        self,
        mailbox: DeviceMailbox,
        executor: _core.MoeExecutor,
        accelerator: _core.DeviceAccelerator,
        pool: _core.ThreadPool,
    ) -> TableStep: ...

class ExpertStream:
    """Experts that pass through two staging slots, in order."""

    def begin(self, layer: int, expert: int) -> None:
        """Begins an upload."""

    def enter(self, stream: _Address) -> None:
        """Work given to the stream from now on may read the expert that was begun first."""

    def unpack(self, matrix: int, out: _Address, is_bf16: bool, stream: _Address) -> None:
        """Gate (0), up (1) or down (2) of the expert entered last, as rows."""

    def read_biases(self, out: _Address, stream: _Address) -> None:
        """Biases of gate, up and down in float32, each aligned to 16 numbers."""

    def leave(self, stream: _Address) -> None:
        """The stream has been given all that reads the expert entered last."""
    device_bytes: Final[int]

class DeviceMailbox:
    """Mapped memory shared by a decode graph and the CPU."""

    address: Final[int]
    results: Final[int]

    def wait(
        self, *, kind: str, layer: int, step: _Address, num_on_cpu: _Address, limit_s: float, stream: _Address
    ) -> None: ...
    def joined_ns(self, layer: int) -> int:
        """Where the device notes when the layer's shares have come together."""

    def abort(self) -> None: ...
    def reset(self) -> None: ...

class StepServer:
    """The CPU side of decode graphs: experts of a store on a pool."""

    def serve(self, step: int, limit_s: float) -> ServedStep: ...

class TableStep:
    """The host side of a table step."""

    def begin(
        self,
        step: int,
        requests: Sequence[int],
        positions: Sequence[int],
        stream: _Address,
        generated: Sequence[int] = (),
        verified: Sequence[int] = (),
    ) -> None: ...
    def serve(self, number: int, limit_s: float) -> ServedStep:
        """{done, layer, text}; not done: wait until the device is idle, then give_up."""

    def end(self, stream: _Address) -> None: ...
    def confirm(self) -> ServedStep:
        """As serve: whether the device took every answer."""

    def give_up(self, stream: _Address) -> None: ...
    cpu_us: Final[float]
    "Spent on the CPU's experts since the start."

def open_device(index: int = 0) -> Device:
    """KernelError if it cannot be used."""

def devices() -> list[DeviceDescription]:
    """One dict per device; sizes in bytes."""

def why_no_device() -> str:
    """What the CUDA runtime says where devices() is empty."""
