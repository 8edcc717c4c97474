"""Types of the native module `twofold._core`, in the order of its bindings (engine/bindings/bind_*.cpp)."""

import builtins
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray
from twofold.weights.weight_format import LayerFormats, WeightMatrix

_F32 = NDArray[np.float32]
_F64 = NDArray[np.float64]
_I8 = NDArray[np.int8]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]
_U8 = NDArray[np.uint8]
_U16 = NDArray[np.uint16]
_U32 = NDArray[np.uint32]

class _Tensor(Protocol):
    def data_ptr(self) -> int: ...

_Address: TypeAlias = int | _Tensor | None
"""A device address, or what lies there; 0, None: null."""

class SchedulerOption(TypedDict):
    """Arguments of `api.settings.setting`; no low or high: no bound."""

    default: Any
    help: str
    low: float | None
    high: float | None

_Part = Mapping[str, object] | None
"""Arguments of one part of a block (engine/bindings/blocks/attention_parts.h). A projection has weight, and where given
bias, norm and eps of the norm; a norm has weight and eps."""

class MachineProfile:
    """Calibrated figures of one machine; units are in the names."""

    @staticmethod
    def from_fields(name: str, fields: Mapping[str, float]) -> MachineProfile: ...
    def with_devices(self, others: Sequence[MachineProfile]) -> MachineProfile:
        """This machine with the devices of others beside its own, at this host."""

class CostModel:
    """How long one MoE layer takes for a given placement."""

    def __init__(
        self,
        profile: MachineProfile,
        expert_bytes: float,
        flops_per_token: float,
        cpu_curve: Sequence[tuple[float, float]] = (),
    ) -> None: ...
    def upload_us(self) -> float: ...
    def cpu_us(self, loads: Sequence[int], dma_busy: float = 0.0) -> float: ...
    def plan_streams(self, tokens: Sequence[int]) -> tuple[list[int], float, float]:
        """(experts to stream to the device, in order; microseconds of the layer so; and on the CPU alone) for the
        tokens of each expert, on a machine of one device."""

    def decode_layer_us(self, num_hits: int, num_fetched: int, num_cpu: int) -> float:
        """Layer time with one token per expert and an idle link."""

    def layer_us(self, hits: Sequence[int], cpu: Sequence[int]) -> float:
        """A layer without uploads, from the tokens of each expert."""

    def machine_layer_us(self, num_hits: Sequence[int], num_cpu: int, home: int = 0) -> float:
        """A layer without uploads and with one token per expert: hits of each device, misses of the CPU, the
        device that the layer begins and ends on."""

    def exchange_us(self, from_device: int, to_device: int) -> float: ...
    def memory_us(self, device: int, bytes: float) -> float:
        """Time to read these bytes from a device's memory."""

class CachePolicy:
    """One entry of the registry of cache policies."""

    name: Final[str]
    offline: Final[bool]
    pooled: Final[bool]
    prefetches: Final[Literal["auto", "asked", "never"]]
    help: Final[str]

def cache_policies() -> list[CachePolicy]: ...

class SchedulerConfig:
    """Shape, slots and options of a layer scheduler; see scheduler_options."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        slots: int | Sequence[int],
        policy: str = "payback",
        prefetch: bool = False,
        num_staging: int = -1,
        upload_price: float = -1.0,
        max_waiting_uploads: int = 16,
        stream_ahead_from: int = 33,
        replace_from: int = 0,
        num_deferred: int = 0,
        cache_prior: float = 0.0,
        fetch_rule: str = "best-split",
        background_uploads: bool = True,
        always_cache_fetched: bool = False,
        shared_pool: bool | None = None,
        fixed_placement: bool = False,
        prior_usage: Sequence[float] = (),
        pins: Sequence[str] = (),
        homes: Sequence[int] = (),
    ) -> None:
        """slots: of the machine's only device, or of each. options: see scheduler_options.

        Raises:
            TypeError: no option has that name, or it has another type."""

def scheduler_options() -> dict[str, SchedulerOption]:
    """Options of SchedulerConfig by name, as declared in engine/core/include/twofold/scheduler_options.h."""

def count_meanings() -> dict[str, tuple[str, dict[str, str]]]:
    """By group, what is counted and the meaning of each counter, as declared in
    engine/core/include/twofold/counters.h."""

class Placement(IntEnum):
    HIT = 0
    CPU = 1
    FETCHED = 2

class UploadReason(IntEnum):
    DEMAND = 0
    ADMISSION = 1
    PREFETCH = 2

class Timeline:
    """Virtual clock with a serial link: demand uploads overtake background ones."""

    def __init__(self, upload_us: float) -> None: ...

class LayerScheduler:
    """Schedules and plays the layers of decode steps."""

    def __init__(self, cost: CostModel, config: SchedulerConfig, link: Timeline) -> None: ...
    def begin_step(self) -> None: ...
    def predict(self, layer: int, logits: _F32) -> None: ...
    def decide(self, layer: int, ids: _I32) -> None: ...
    def advance(self, us: float) -> None: ...
    now_us: Final[float]

    def counts(self) -> dict[str, dict[str, int]]: ...

class RoutingTrace:
    """Recorded routing: ids u16[tokens, layers, top_k], checked once."""

    def __init__(self, ids: _U16, weights: _F32 | None, offsets: _I64, num_experts: int) -> None: ...

class ReplayCounts:
    """Sums over one replay; hits and misses count distinct experts per event."""

    num_steps: Final[int]
    num_tokens: Final[int]
    num_events: Final[int]
    num_hits: Final[int]
    num_misses: Final[int]
    num_uploads: Final[int]
    num_evictions: Final[int]

def replay(
    trace: RoutingTrace,
    batch: int,
    num_slots: int,
    policy: str,
    upload_price: float,
    prior_usage: Sequence[float] = (),
    shared_pool: bool | None = None,
    warm_up: RoutingTrace | None = None,
) -> ReplayCounts:
    """Plays a trace through a new cache, empty but for a policy that moves nothing: that one starts with the
    most used of prior_usage. warm_up is played first and not counted (online policies only)."""

class SimulationResult:
    """Sums over one simulated decode; times in microseconds."""

    num_steps: Final[int]
    num_tokens: Final[int]
    num_hits: Final[int]
    num_cpu: Final[int]
    num_fetched: Final[int]
    num_uploads: Final[int]
    num_evictions: Final[int]
    total_us: Final[float]
    num_prompt_tokens: Final[int]
    prompt_us: Final[float]
    moe_us: Final[float]
    cpu_us: Final[float]
    gpu_us: Final[float]
    link_us: Final[float]
    layer_us: Final[_F32]

def simulate(
    trace: RoutingTrace,
    batch: int,
    cost: CostModel,
    config: SchedulerConfig,
    dense_us: Sequence[float],
    keep_layer_us: bool = False,
    prompt_chunk: int = 0,
    token_us: Sequence[float] = (),
    prompt_tokens: int = 0,
) -> SimulationResult:
    """Plays a trace on the virtual clock; with prior_usage the slots are filled before the start.
    prompt_chunk: sequences are prompts, so many tokens a step. prompt_tokens: each sequence is a request of
    so many prompt tokens, the others are decoded."""

def simulate_steps(
    trace: RoutingTrace,
    cost: CostModel,
    config: SchedulerConfig,
    dense_us: Sequence[float],
    next_rows: Callable[[SimulationResult], Sequence[int]],
) -> SimulationResult:
    """Plays decode steps that next_rows composes: given the sums so far, it returns the trace rows of the next
    step, the newest token's first, then those of drafts; an empty list ends the simulation."""

def simulate_recorded(
    trace: RoutingTrace,
    begins: _I64,
    requests: _I64,
    positions: _I32,
    decodes: _U8,
    expected: _U16,
    first_counted: int,
    residents: _U8,
    cost: CostModel,
    config: SchedulerConfig,
    dense_us: Sequence[float],
    token_us: Sequence[float] = (),
) -> SimulationResult:
    """Plays the steps that a run recorded: step i is rows begins[i] to begins[i + 1] of the trace, with a
    request and a position per row. decodes [steps]: without prompt tokens. expected [tokens, layers, top_k]:
    experts that the router of the layer before expects; empty without prefetch. residents [layers, experts]:
    those in slots before the first step. Sums over the decode steps from first_counted on."""

def default_upload_price(cost: CostModel) -> float: ...
def cpu_features() -> dict[str, bool]:
    """What the CPU has and the operating system enables."""

def runnable_levels() -> list[str]:
    """ISA levels of kernels, by name, best last."""

def left_out_levels() -> list[str]:
    """Levels that this CPU can run and this build leaves out (TWOFOLD_LEVELS)."""

def isa_choice() -> tuple[str, str]:
    """The level of the CPU kernels and why it was chosen. ConfigError when TWOFOLD_ISA cannot be met."""

def work_times() -> dict[str, float]:
    """Seconds that each kind of native work has taken since the process began."""

def work_of_parts() -> tuple[float, float, float, float, float, float]:
    """Microseconds of (embedding, attention, routers, dense feed-forward, experts, head) since the process
    began."""

def cgroup_folders(controller: str, root: str = "") -> list[str]:
    """Folders of this process's cgroup and of those above it, in both versions of cgroups."""

class ThreadPool:
    """Threads that work on one operation at a time, and the ISA level of operators created on it."""

    def __init__(self, num_threads: int = 0, numa: str = "off", root: str = "") -> None: ...
    num_threads: Final[int]
    num_nodes: Final[int]
    reason: Final[str]
    placement: Final[list[tuple[int, list[int]]]]

    def bind_caller(self) -> None: ...
    def limit(self, count: int) -> None:
        """Set the number of threads for operations; 0: all. ConfigError with several memory nodes."""

    def at_level(self, level: str) -> ThreadPool:
        """The same threads, for operators with kernels of another level. ConfigError if this CPU cannot run it."""
    level: Final[str]

class StateCache:
    """Paged state of sequences between steps. Per layer: (planes, elements per token, dtype), ..."""

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[int, int, Literal["float32", "bfloat16", "q8", "fp8"]]]],
        num_pages: int,
        page_size: int,
        record_bytes: Sequence[int] = (),
        num_records: int = 0,
    ) -> None:
        """record_bytes: bytes of a sequence's record in each layer; empty: no layer has records."""
    num_layers: Final[int]
    num_pages: Final[int]
    page_size: Final[int]
    num_records: Final[int]
    bytes: Final[int]

    def fork_page(self, from_page: int, to_page: int) -> None:
        """Copy one page to another, in all layers. IndexError for a page that does not exist."""

    def fork_record(self, from_record: int, to_record: int) -> None: ...
    def read_page(self, page: int) -> builtins.bytes:
        """One page's rows of all layers, to be written back later to any page."""

    def write_page(self, page: int, data: builtins.bytes) -> None:
        """ValueError: the bytes are not a page of these layers."""

    def read_record(self, record: int) -> builtins.bytes: ...
    def write_record(self, record: int, data: builtins.bytes) -> None: ...
    def resize(self, num_pages: int, kept: Mapping[int, int], keep_records: bool = True) -> None:
        """Set the number of pages; page kept[p] gets the content of p. Raises ConfigFailure without memory, IndexError
        for a page that does not exist; then nothing has changed."""

class AttentionBatch:
    """One flattened batch of tokens as attention sees it."""

    def __init__(
        self,
        positions: _I32,
        sequence_index: _I32,
        page_tables: _I32,
        rope_cos: _F32,
        rope_sin: _F32,
        records: _I32 | None = None,
    ) -> None:
        """records: number of each sequence's record, if layers have records."""

    @staticmethod
    def of_table(
        positions: _I32,
        sequence_index: _I32,
        page_tables: _I32,
        cos_table: _F32,
        sin_table: _F32,
        records: _I32 | None = None,
    ) -> AttentionBatch:
        """The same, of rotations by position [longest, pairs]."""

    def add_rotation(self, rope_cos: _F32, rope_sin: _F32) -> None:
        """Add a rotation for layers with a different one; rope_cos, rope_sin [T, its rotated pairs]."""

    def keep_records(self, numbers: _I32) -> None:
        """Records that receive the layers' state after each token, [T]; -1: none. For the verification of drafts."""

    def see_until(self, ends: _I32) -> None:
        """Position after the last one that each token attends to in bidirectional layers, [T]: tokens of a picture
        attend to one another."""
    num_tokens: Final[int]

def panel_rows() -> int:
    """Rows of a matrix in one panel."""

def panel_layout() -> str:
    """Identifier of this build's panel layout; panels are readable only by builds with the same identifier."""

class FileMapping:
    """A read-only memory-mapped file; all processes that map it share its pages. Calls raise OSError."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __init__(self, path: bytes) -> None: ...
    bytes: Final[int]

    def change(self) -> str:
        """What happened to the file if it was written to or became shorter since; empty while it was not."""

    def accept(self) -> None:
        """The file's present state is the expected one from now on."""

    def release(self, offset: int, bytes: int) -> None:
        """Removes whole pages from this process's page table."""

    def populate(self, offset: int, bytes: int) -> None:
        """Reads the range and maps it. OSError where the disk fails or the file has become shorter."""

    def resident_bytes(self, offset: int, bytes: int) -> int:
        """How much of the range is in the system's cache."""

class Ranks:
    """Processes that each hold a share of one model's weights; rank 0 computes the model.

    send_job(to, job, rows) and receive(from, rows) are called by native code with the bytes to send, and those to
    fill."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        send_job: Callable[[int, memoryview, memoryview], None],
        receive: Callable[[int, memoryview], None],
    ) -> None: ...
    def ping(self) -> None:
        """Ask every rank for a sign of life, unless a job is running. Raises KernelError if one is lost."""
    rank: Final[int]
    size: Final[int]

class AdapterRows:
    """Which adapter each row of the coming products uses: one object per model."""

    def __init__(self) -> None: ...
    def set(self, adapters: Sequence[int]) -> None:
        """One number per row of the step, -1 for none; an empty list: no row uses any."""

class LowRank:
    """What an adapter adds to a product with some rows of a matrix: B (A x)."""

    def __init__(
        self, a: NDArray[Any], b: NDArray[Any], first_row: int = 0, like: LowRank | None = None
    ) -> None:
        """a: float32 [rank, columns]; b: float32 [rows, rank], for the matrix's rows from first_row on. like: a
        product that may have the same a, which then lies in memory once."""
    bytes: Final[int]

class PackedMatrix:
    """Matrices stacked by rows, in the kernels' panels."""

    def __init__(
        self, pool: ThreadPool, parts: Sequence[WeightMatrix], ranks: Ranks | None = None, number: int = -1
    ) -> None:
        """ranks: pack this rank's share of matrix `number`; without a number, the whole matrix on rank 0 alone."""

    @staticmethod
    def from_file(
        pool: ThreadPool, parts: Sequence[tuple[str, int]], columns: int, file: FileMapping, offset: int
    ) -> PackedMatrix:
        """Panels that lie in a file; parts are (format, rows)."""
    rows: Final[int]
    columns: Final[int]
    bytes: Final[int]
    formats: Final[list[str]]
    segment_rows: Final[list[int]]

    def put_adapter(self, rows: AdapterRows, adapter: int, part: LowRank) -> None:
        """Rows of products that use `adapter` get what the part adds to them. Between two steps only."""

    def drop_adapter(self, adapter: int) -> None: ...
    panels: Final[_U8]

def embed(pool: ThreadPool, table: WeightMatrix, token_ids: _I32, out: _F32) -> None: ...

class Embedding:
    """Rows of a table by token."""

    def __init__(self, pool: ThreadPool, table: WeightMatrix) -> None: ...
    def forward(self, token_ids: _I32, out: _F32) -> None: ...

class LmHead:
    """Final norm and output projection."""

    def __init__(
        self,
        pool: ThreadPool,
        norm_weight: _F32 | None,
        weight: PackedMatrix,
        eps: float,
        softcap: float = 0.0,
    ) -> None:
        """norm_weight: None: hidden states are read as they are. softcap: logits become
        softcap * tanh(logits / softcap); 0: they stay."""

    def forward(self, hidden_rows: _F32, logits: _F32) -> None: ...
    def norm(self, hidden_rows: _F32, out: _F32) -> None:
        """The rows that the matrix is multiplied with; out may be hidden_rows."""

    def with_weight(self, weight: PackedMatrix) -> LmHead:
        """The same with another matrix."""

    def with_norm(self, norm_weight: _F32) -> LmHead:
        """The same matrix after another norm."""

class RowTable:
    """Rows of a table that stays in its file, cached up to a bound of bytes."""

    def __init__(self, pool: ThreadPool, parts: Sequence[WeightMatrix], cache_bytes: int) -> None:
        """parts: the table's rows in order; those that are not in a mapped file are read in place."""

    def read(self, ids: _I64, out: _F32, first: int = 0) -> None:
        """out[t, first:] becomes rows ids[t], one after the other. KernelError for one with a NaN or an infinity."""

    def read_ahead(self, ids: _I64) -> None:
        """Asks the system to read rows that are not cached. From any thread."""
    rows: Final[int]
    columns: Final[int]
    bytes: Final[int]
    cache_bytes: Final[int]
    num_slots: Final[int]
    num_reads: Final[int]
    num_hits: Final[int]

class LayerInputs:
    """Inputs of all layers, by a table of tokens and a projection of their embeddings."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        table: RowTable,
        projection: PackedMatrix,
        norm_weight: _F32,
        eps: float,
        table_scale: float,
    ) -> None: ...
    def forward(self, token_ids: _I64, hidden: _F32, out: _F32) -> None:
        """hidden [T, hidden]: scaled embeddings; out [T, layers * size]."""

class Block:
    """Part of a layer: adds to the residual stream."""

    hidden_size: Final[int]

class Stretch:
    """One stretch of positions that a query attends to: the last ones, those of its chunk, or (0) all."""

    def __init__(self, *, window: int = 0, chunk: int = 0) -> None: ...

class ScoreRule:
    """The scale and bounds of a score (kernels/include/twofold/attention_parts.h)."""

    def __init__(self, *, scale: float = 1.0, softcap: float = 0.0) -> None: ...

class Chooser:
    """Chooses positions for the queries of a layer (engine/runtime/ops/attention/parts/selection.h)."""

class Indexer(Chooser):
    """Learned indexer: chooses the positions, or blocks of positions, with the largest scores."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        num_heads: int,
        head_dim: int,
        queries: _Part,
        keys: _Part,
        key_norm: _Part,
        query_norm: _Part = None,
        rotation: _Part = None,
        rotates_last: bool = False,
        of_input: bool = False,
        input_norm: _Part = None,
        scale: _Part = None,
        block: int | None = None,
        local: int | None = None,
        pooled: int | None = None,
        pool_rotation: _Part = None,
        pool_bias: _F32 | None = None,
    ) -> None:
        """queries: of low-rank queries, or with of_input of the block's input; input_norm: a further norm of that,
        after the norm of `queries`. scale: as for Gqa. keys: one key; without `block` and `pooled`, also a weight per
        head. A query has one list; with `block`, one per head, of blocks of so many positions, of which the last
        `local` ones are always chosen. pooled: one list, of pools of so many positions, whose key is the mean of
        theirs, rotated by pool_rotation, and of the positions after the last whole pool. pool_bias: [pooled, head_dim];
        the pool's key is the sum by the softmax of it and of gates instead, which `keys` has before weights.
        rotates_last: the last elements of a head are rotated, not the first ones."""

class Gqa(Block):
    """Grouped-query attention, composed of parts."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        layer: int,
        heads: _Part,
        project: _Part,
        scores: _Part,
        out: _Part,
        q_norm: _Part = None,
        k_norm: _Part = None,
        v_norm: _Part = None,
        flat_norms: bool = False,
        rotation: _Part = None,
        scale: _Part = None,
        select: _Part = None,
        gate: _Part = None,
    ) -> None:
        """layer: index in the cache, where it has num_kv_heads planes of head_dim elements for keys, then as many of
        value_dim for values.

        Args:
            heads: num_heads, num_kv_heads, head_dim, value_dim (None: head_dim); keys_are_values: the projection has no
                rows of v, values are the keys before norm and rotation; shares_kv: it has no rows of k and v, `layer`
                of the cache has keys and values already; value_scale: factor of values.
            project: rows of all queries, keys, values and gates, with the norm of the input.
            scores: rule, and sinks [num_heads]: logits that take part in the softmax and have no value.
            flat_norms: q_norm and k_norm span all heads, [num_heads * head_dim] and [num_kv_heads * head_dim].
            rotation: index of the batch's rotation; neighbours: it pairs elements 2i and 2i + 1. None: queries and keys
                carry no positions.
            scale: with a period, queries are multiplied by 1 + slope * log1p(floor((position + shift) / period)); with
                slopes and bases [heads], by slope * log(position + 1) + base; elements [head_dim]: factors of the
                rotated queries.
            select: stretch of positions (Stretch); most: bound of the positions chosen for a query; chooser, None:
                those that the last chooser of the step chose; bidirectional: tokens of a picture attend to one another.
                None: all positions.
            gate: activation (sigmoid, softplus, silu) by which a head's output is multiplied; interleaved: each head's
                gate follows its query; else rows: 1 or value_dim rows per head after all values."""

class Mla(Block):
    """Multi-head latent attention, absorbed."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        layer: int,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        project: _Part,
        latent_norm: _Part,
        k_b: PackedMatrix,
        v_b: PackedMatrix,
        rotation: _Part,
        scores: _Part,
        out: _Part,
        q_b: _Part = None,
        scale: _Part = None,
        select: _Part = None,
        key_norm: _Part = None,
        gate: _Part = None,
        kv_layer: int | None = None,
    ) -> None:
        """project: queries or, with q_b, their low-rank part, then latent and shared key, then gates. q_b: what it
        reads is doubled if the part says so: the normed rows, then the same without the norm. k_b and v_b have a part
        per head: [latent, nope_dim] and [value_dim, latent]. layer: index in the cache, where it has one plane of
        latent + rope_dim elements; kv_layer: an earlier one that has it instead, so that `project` and `latent_norm`
        have none. rotation, scale, select, scores, gate: as for Gqa."""

class ShortConvolution(Block):
    """A gated short convolution; its record per sequence is the last taps - 1 inputs, float32."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        layer: int,
        project: _Part,
        conv: _F32,
        conv_bias: _F32 | None,
        out: _Part,
        record_at: int = 0,
    ) -> None:
        """project: [3 hidden, hidden], input gate, output gate and values. conv: [taps, hidden]. record_at: byte of the
        layer's records where the block's begins."""

class GatedDelta(Block):
    """A gated delta net; it keeps a record per sequence."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        layer: int,
        project: _Part,
        conv: _F32,
        decay_rate: _F32,
        decay_bias: _F32,
        head_norm: _Part,
        gate: _Part,
        out: _Part,
        num_k_heads: int,
        num_v_heads: int,
        key_dim: int,
        value_dim: int,
        tiled: bool,
        grouped: bool,
        grouped_gates: bool,
        record_at: int = 0,
    ) -> None:
        """layer: index in the cache, where its records have `record_bytes`.

        Args:
            project: queries, keys, values and z of all heads, then b and a; `grouped` and `grouped_gates`: by key head.
            conv: [taps, channels] of all queries, all keys, all values.
            decay_rate: [num_v_heads], negative.
            decay_bias: [num_v_heads].
            gate: activation of z.
            tiled: value head h uses key head h % num_k_heads; otherwise the value heads of a key head are adjacent."""

    @staticmethod
    def record_bytes(
        *, num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, taps: int
    ) -> int: ...

class RouterShape:
    """How a router turns logits into experts and weights: score, choice (by score and bias, within the best groups;
    zero_others: those of other groups by a score of 0), weights divided by their sum, times scale."""

    def __init__(
        self,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"] = "softmax",
        renormalise: bool = False,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: Literal["max", "top_two_sum"] = "max",
        zero_others: bool = False,
    ) -> None: ...

class Router(Block):
    """Norm, gate, scores and top-k of an MoE layer."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        norm_weight: _F32 | None,
        gate_weight: _F32 | _U16,
        eps: float,
        shape: RouterShape,
        bias: _F32 | None = None,
        gate_bias: _F32 | None = None,
        gate_norm: _F32 | None = None,
        expert_scale: _F32 | None = None,
        softcap: float = 0.0,
        pictures_gate: _F32 | _U16 | None = None,
        pictures_bias: _F32 | None = None,
    ) -> None:
        """bias [experts]: added to scores for choosing only; gate_bias: added to logits; expert_scale: scales weights.

        gate_norm [hidden]: norm of the router's input rows, if experts read other rows. Without norm_weight, rows are
        read as they are. softcap: above 0, logits become softcap * tanh(logit / softcap).

        pictures_gate, pictures_bias: of rows of pictures, to as many experts after those of gate_weight."""

class RoutedExperts(Block):
    """The experts chosen by the preceding router, run wherever the executor places them."""

    def __init__(self, hidden_size: int, moe_layer: int, weighs_rows: bool = False) -> None:
        """weighs_rows: a token's weight multiplies the input of its one expert, not the output."""

class SharedExperts(Block):
    """A feed-forward block on the router's normed rows, times sigmoid(shared_gate [hidden] . row) if gated."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        gate: PackedMatrix,
        up: PackedMatrix,
        down: PackedMatrix,
        shared_gate: _F32 | None = None,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None: ...

class DenseFfn(Block):
    """A gated feed-forward with a norm of its own."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        norm_weight: _F32,
        gate: PackedMatrix,
        up: PackedMatrix,
        down: PackedMatrix,
        eps: float,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None: ...

class MtpInput(Block):
    """Replaces embeddings by their projection together with the hidden states of the tokens before."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        embedding_norm: _F32,
        hidden_norm: _F32,
        eps: float,
        projection: PackedMatrix = ...,
        of_embedding: PackedMatrix = ...,
        of_hidden: PackedMatrix = ...,
        num_streams: int | None = None,
    ) -> None:
        """projection: of both in a row; or one of the embedding, one of the hidden state. hidden_norm: [streams *
        hidden]."""

class LayerInput(Block):
    """Adds projection . (gelu(gate . hidden) * input), the input being a part of the step's `layer_inputs`."""

    def __init__(self, pool: ThreadPool, *, gate: PackedMatrix, projection: PackedMatrix, first: int) -> None:
        """first: where the layer's input begins in a row of the step's."""

class NgramInput(Block):
    """Adds gated embeddings of n-grams, and a convolution of them, to every residual stream."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        key: PackedMatrix,
        value: PackedMatrix,
        key_norm: _F32,
        query_norm: _F32,
        conv_norm: _F32,
        conv: _F32,
        dilation: int,
        eps: float,
        first: int,
        layer: int,
        record_at: int = 0,
    ) -> None:
        """key: [streams * hidden, size], value: [hidden, size]. conv: [taps, streams * hidden], the oldest first.

        first: where the layer's input begins in a row of the step's `layer_inputs`. record_at: byte of the layer's
        records where the block's begins."""

class PostNorm(Block):
    """The `over` preceding blocks add to rows of zeros; their norm is added to the residual, and all is scaled."""

    def __init__(
        self, pool: ThreadPool, *, norm_weight: _F32, eps: float, over: int, scale: float = 1.0
    ) -> None: ...

class GatedNorm(Block):
    """The `over` preceding blocks read n * sigmoid(up . silu(down . n)), n = norm(residual)."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        norm_weight: _F32,
        eps: float,
        down: PackedMatrix,
        up: PackedMatrix,
        over: int,
    ) -> None: ...

class HyperConnection(Block):
    """The `over` preceding blocks read one hidden state of the residual streams and add to rows of zeros. Each stream
    gets the result times a weight of its own."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        num_streams: int,
        eps: float,
        over: int,
        mix: PackedMatrix = ...,
        base: _F32 = ...,
        scale: _F32 = ...,
        offset: float = ...,
        magnitude: float = ...,
        output_offset: float | None = None,
        rounds: int | None = None,
        norm: _F32 = ...,
        down: PackedMatrix = ...,
        up: PackedMatrix = ...,
        inject: PackedMatrix = ...,
    ) -> None:
        """With `mix`, a weighted sum is read. Weights are sigmoid(scale * (mix . x) / rms(x) + base) + offset.
        x is its streams in a row.

        mix: [2 num_streams, num_streams * hidden], for the sum, then for the output, whose weights are multiplied by
        `magnitude` and have `output_offset`, if it is given. base: a value per row. scale: [2]. rounds: num_streams²
        rows more, and a third scale, make a matrix by softmax and so many rounds of Sinkhorn's iteration; before the
        output is added, stream s becomes the sum of streams r times matrix[r, s].

        With `down`, the mean of the normed streams n is read, each element times
        sigmoid(up . silu(down . n / num_streams)). Weights of the output are 2 sigmoid(inject . n / num_streams).

        norm: [num_streams * hidden]. down: [rank, num_streams * hidden]. up: [num_streams * hidden, rank]. inject:
        [num_streams, num_streams * hidden]."""

class StreamHead(Block):
    """Last block of a model with several residual streams: the hidden state that is read of them."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        num_streams: int,
        eps: float,
        mix: PackedMatrix = ...,
        base: _F32 = ...,
        scale: _F32 = ...,
        offset: float = ...,
        norm: _F32 = ...,
        down: PackedMatrix = ...,
        up: PackedMatrix = ...,
    ) -> None:
        """As for `HyperConnection`: with num_streams rows of `mix` and one scale, or without `inject`."""

class Decoder:
    """The blocks of a model in one call."""

    def __init__(
        self, blocks: Sequence[Block], pool: ThreadPool | None = None, threads: Sequence[int] = ()
    ) -> None:
        """threads: pool threads per block; 0 or an empty list: all."""

    def forward(
        self,
        hidden: _F32,
        batch: AttentionBatch,
        cache: StateCache,
        experts: MoeExecutor | None = None,
        previous: _F32 | None = None,
        layer_inputs: _F32 | None = None,
    ) -> None:
        """experts: None if no block has any. previous: [T, streams * hidden], normed hidden states, or streams, that a
        `MtpInput` reads.

        layer_inputs: result of `LayerInputs.forward` for the batch's tokens, which a `LayerInput` reads."""
    streams: Final[_F32]
    "Several streams of the last forward pass, f32 [T, streams * hidden size]."

def measure_ceilings(
    pool: ThreadPool, *, level: str | None = None, read_bytes: int = 536870912, round_s: float = 0.01
) -> dict[str, float]:
    """What the pool's threads can do at most at a level (default: this process's), the fastest of several
    turns: read_gb_per_s, fork_join_us, and f32_gop_per_s, bf16_..., int8_..., bf16_tiles_..., int8_tiles_...
    as far as the level has them (a multiplication and an addition are two operations)."""

def products_of(format: str) -> str:
    """The kind of product that weights of a format are multiplied in: f32, bf16, int8, bf16_tiles, int8_tiles."""

def weight_formats() -> dict[str, tuple[int, int, int, int, int, int, str, bool]]:
    """Fields of FormatLayout by the format's name, in the order of the registry."""

def quantise_rows(pool: ThreadPool, x: _F32, format: str, importance: _F32 | None = None) -> _U8:
    """float32 [rows, columns] as uint8 [rows, bytes of a row]."""

def pack_panels(matrix: WeightMatrix) -> _U8:
    """A WeightMatrix as the kernels read it: uint8 [bytes]. ValueError for a NaN or an infinity."""

def expect_finite(pool: ThreadPool, matrix: WeightMatrix) -> None:
    """KernelError for a WeightMatrix that holds a NaN or an infinity."""

class TokenRules:
    """One request's changes to its logits before sampling; `take` adds the answer's tokens."""

    def __init__(
        self,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        bias: Sequence[tuple[int, float]] = (),
        bad_words: Sequence[Sequence[int]] = (),
        withheld: Sequence[int] = (),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None: ...
    def take(self, token: int) -> None: ...

def pick_tokens(pool: ThreadPool, logits: _F32, draws: _F64, rules: Sequence[TokenRules | None]) -> _I32:
    """Sampled tokens [R] of logits [R, vocabulary], which are modified temporarily. draws [R, 5]: temperature, top-k,
    top-p, min-p, uniform number."""

def mask_logits(pool: ThreadPool, logits: _F32, rows: Sequence[int], masks: Sequence[_U32]) -> None:
    """Set logits[rows[i]] [vocabulary] to -inf where the bit in masks[i] [at least ceil(vocabulary / 32)] is 0. The
    lowest bit of the first word is token 0."""

def log_probabilities(
    pool: ThreadPool, logits: _F32, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Per query the requested token and the likeliest ones of its row, with their log softmax in float64."""

class CacheEventKind(IntEnum):
    ADMIT = 0
    EVICT = 1
    REJECT = 2
    PUBLISH = 3

def event_formats() -> dict[str, tuple[np.dtype[Any], dict[str, str]]]:
    """By kind of event, the dtype of its arrays and the meaning of each field."""

def slot_stride(largest_expert_bytes: int) -> int:
    """From one expert slot on a device to the next, in bytes."""

class ExpertStore:
    """All experts of a model in host memory, each packed once."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        formats: Sequence[LayerFormats],
        huge_pages: bool = True,
        activation: str = "silu",
        biases: bool = False,
        limits: Sequence[float] = (),
        ranks: Ranks | None = None,
        holders: Sequence[int] = (),
        second_half: int = 0,
    ) -> None:
        """formats: of each layer's experts, for all or for each. second_half: intermediate size of the second half of
        them; 0: as the first half's.

        limits: of the activation (kernels/include/twofold/expert.h), one per layer, 0 for none; or none at all.

        ranks: hold this rank's experts alone. holders: bit masks of the ranks of each expert, [layers * experts]."""

    @staticmethod
    def from_file(
        num_experts: int,
        hidden: int,
        intermediate: int,
        formats: Sequence[LayerFormats],
        file: FileMapping,
        offset: int,
        activation: str = "silu",
        biases: bool = False,
        limits: Sequence[float] = (),
        second_half: int = 0,
    ) -> ExpertStore:
        """Panels that lie in a file."""

    def copied(self, pool: ThreadPool) -> ExpertStore:
        """The same in memory of its own."""

    def set_kernels(self, layer: int, pool: ThreadPool) -> None:
        """The CPU computes the layer's experts with the kernels of `pool`."""

    def put(
        self,
        pool: ThreadPool,
        layer: int,
        first: int,
        experts: Sequence[tuple[WeightMatrix, WeightMatrix, WeightMatrix]],
    ) -> None: ...
    def put_biases(self, layer: int, first: int, biases: _F32) -> None:
        """Biases of experts from `first` on, float32 [experts, 2 intermediate + hidden]: gate's, up's, down's."""

    def put_adapter(
        self, rows: AdapterRows, adapter: int, place: tuple[int, int, int], part: LowRank
    ) -> None:
        """As PackedMatrix.put_adapter, for the matrix (layer, expert, 0 gate, 1 up or 2 down)."""

    def drop_adapter(self, adapter: int) -> None: ...
    def formats(self, layer: int) -> tuple[str, str, str] | list[tuple[str, str, str]]:
        """(gate, up, down) of a layer's experts, or a list of one for each if they differ."""

    def offsets(self, layer: int) -> _I64:
        """Offset of each expert of the layer, in bytes from the begin of the store; -1: not held by this process."""

    def panels(self, layer: int) -> _U8:
        """A layer's experts that this process holds, as they lie."""

    def holds(self, layer: int, expert: int) -> bool:
        """Whether this process holds the expert."""
    num_layers: Final[int]
    mapped: Final[bool]
    "Whether they lie in a file's pages."
    bytes: Final[int]
    expert_bytes: Final[int]
    mean_expert_bytes: Final[int]
    flops_per_token: Final[float]

class RankWorker:
    """Answers the jobs of rank 0 with this rank's share of the weights."""

    def __init__(
        self, pool: ThreadPool, matrices: Sequence[PackedMatrix], experts: ExpertStore | None
    ) -> None: ...
    def run(self, job: _I32, rows: _F32) -> _F32:
        """The answer [numbers] to a job, given the rows sent with it [numbers]. Raises ValueError for a damaged job."""

class KeptRows:
    """What backward reads of a forward."""

    num_bytes: Final[int]

class ExpertTraining:
    """Routed experts in training: forward and backward in float32 over packed weights."""

    def __init__(self, pool: ThreadPool, store: ExpertStore) -> None: ...
    def forward(
        self,
        layer: int,
        x: _F32,
        ids: _I32,
        weights: _F32,
        factors: Sequence[tuple[NDArray[Any], NDArray[Any], float] | None],
        keep: bool,
        elsewhere: Sequence[int] = (),
    ) -> tuple[_F32, KeptRows]:
        """(y [tokens, hidden], KeptRows) for x float32 [tokens, hidden], ids int32 and weights float32 [tokens,
        top_k]. factors: of gate, up and down, None or (a [experts, rank, columns], b [experts, rows, rank],
        scale). Without keep nothing is kept, and backward computes it again. elsewhere: by expert, 1 where
        another lane computes it; empty: none."""

    def backward(
        self,
        layer: int,
        x: _F32,
        ids: _I32,
        weights: _F32,
        factors: Sequence[tuple[NDArray[Any], NDArray[Any], float] | None],
        dy: _F32,
        kept: KeptRows,
        elsewhere: Sequence[int] = (),
    ) -> tuple[_F32, _F32, list[tuple[_F32, _F32] | None]]:
        """(dx, dweights, [None or (da, db)] * 3) for dy, the gradient of y."""

class PlacedGroups:
    """Experts of a layer: copies of their tokens' pairs, grouped."""

    experts: Final[_I32]
    begin: Final[_I32]
    pairs: Final[_I32]
    addresses: Final[_I64]

    def __len__(self) -> int: ...

class LayerPlan:
    """Which device, or the CPU, computes each expert of a layer; valid until the next layer."""

    def ready(self, device: int = 0) -> PlacedGroups: ...
    def awaited(self, device: int = 0) -> PlacedGroups: ...
    on_cpu: Final[PlacedGroups]
    joins_deferred: Final[bool]
    uses_cpu: Final[bool]
    where: Final[_U8]

class RoutingDetail(IntEnum):
    OFF = 0
    COUNTS = 1
    TOKENS = 2

class RoutingCounts:
    """How often each expert was routed to, by where it ran."""

    def start(self, detail: RoutingDetail, every: int = 1) -> None: ...
    detail: Final[RoutingDetail]
    num_steps: Final[int]
    num_tokens: Final[int]

    def take(self) -> _I64:
        """[placements, layers, experts] since the last take."""

    def take_step(self) -> dict[str, Any] | None:
        """The last step's number, requests and positions [tokens], experts and placement [layers, tokens, top_k]."""

class SlottedAccelerator:
    """Created by a module with devices (twofold._cuda)."""

class DeviceAccelerator(SlottedAccelerator):
    """Expert slots on a device, with uploads in real time. Addresses are the device's."""

    warning: Final[str]
    slot_base: Final[int]
    slot_stride: Final[int]
    slot_table: Final[int]
    store_base: Final[int]

    def split_table(self) -> list[int]: ...
    def read_prices(self) -> list[int]: ...
    def before_compute(self, stream: _Address, device: int = 0) -> None: ...
    def after_compute(self, stream: _Address, device: int = 0) -> None: ...

class DenseCost:
    """Work beside the routed experts: entry i runs before MoE layer i, the last one after the last MoE layer.

    cpu_bytes, cpu_flops_per_token: the CPU's part of each stretch, in none of the other figures; handovers: its
    transfers of the residual stream. Empty: none. router_bytes: one router's gate."""

    def __init__(
        self,
        *,
        bytes: Sequence[float],
        flops_per_token: Sequence[float],
        router_bytes: float = 0.0,
        cpu_bytes: Sequence[float] = (),
        cpu_flops_per_token: Sequence[float] = (),
        handovers: Sequence[float] = (),
    ) -> None: ...

class MoeExecutor:
    """Runs MoE layers: decides where, computes, records."""

    def __init__(
        self, pool: ThreadPool, store: ExpertStore, cost: CostModel | None = None, num_deferred: int = 0
    ) -> None: ...
    @staticmethod
    def emulated(
        pool: ThreadPool,
        store: ExpertStore,
        cost: CostModel,
        config: SchedulerConfig,
        dense: DenseCost,
        *,
        preload: bool,
        begin_us: float = 0.0,
        first_step: int = -1,
    ) -> MoeExecutor: ...
    @staticmethod
    def on_device(
        pool: ThreadPool,
        store: ExpertStore,
        accelerator: SlottedAccelerator,
        preload: bool = False,
        first_step: int = -1,
    ) -> MoeExecutor: ...
    def begin_step(
        self,
        step: int,
        requests: Sequence[int],
        positions: Sequence[int],
        generated: Sequence[int] = (),
        verified: Sequence[int] = (),
        is_recorded: bool = True,
        pictures: Sequence[int] = (),
    ) -> None:
        """verified: rows of a next token and its drafts, which are decode tokens; empty: none. is_recorded: False for a
        drafter's pass, whose routing is neither counted nor an event. pictures: rows with experts of pictures; empty:
        none."""

    def forward(self, layer: int, normed: _F32, ids: _I32, weights: _F32, hidden: _F32) -> None: ...
    def begin_layer(self, layer: int, ids: _I32, weights: _F32) -> LayerPlan: ...
    def compute_cpu(self, normed: _F32, rows: _F32) -> None: ...
    def end_layer(self, us: float, dense_us: float = -1.0) -> None: ...
    needs_look_ahead: Final[bool]
    "Whether predictions for later layers are used in this step."

    def predict(self, layer: int, logits: _F32) -> None: ...
    def save_cache(self, path: str) -> None: ...
    def record_release(self) -> int:
        """Record that all experts leave their slots. Returns the number of the last step, -1 if there was none."""

    def restore_cache(self, path: str) -> int: ...
    def place_experts(self, wanted: _U8) -> int:
        """Make exactly these experts resident, [layers, experts]; call between steps. Returns the number of uploads."""

    def counts(self) -> dict[str, int]: ...
    def scheduler_counts(self) -> dict[str, dict[str, int]]:
        """By group, see count_meanings."""

    def end_step(self, with_head: bool = True) -> None:
        """with_head: False where no logits were computed."""

    def idle(self) -> None: ...
    events_enabled: bool
    routing_counts: Final[RoutingCounts]
    virtual_now_us: Final[float | None]

    def clock_parts(self) -> tuple[float, float, float, float, float]: ...
    num_expert_runs: Final[int]
    num_slots: Final[int]
    device_bytes: Final[int]

    def placement(self) -> tuple[_U8, _F64] | None:
        """[layers, experts] state (0 absent, 1 in flight, 2 resident) and policy score; None without slots."""

    def placement_devices(self) -> _I8 | None:
        """[layers, experts] device that holds the expert, the first of several; -1: none. None without slots."""

    def drain_events(self) -> dict[str, NDArray[Any]]: ...
    def take_dropped(self) -> dict[str, int]: ...
