"""Types of the native module `twofold._core`, in the order of the bindings' files (engine/bindings/bind_*.cpp)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, final

import numpy as np
from numpy.typing import NDArray
from twofold.weights.weight_format import WeightMatrix

_F32 = NDArray[np.float32]
_U8 = NDArray[np.uint8]
_I32 = NDArray[np.int32]
_PlainMatrix = NDArray[np.float32] | NDArray[np.uint16]

class _NativeEnum:
    __members__: ClassVar[dict[str, Self]]
    def __int__(self) -> int: ...

# ---- bind_core.cpp: cost model, planners, clock

@final
class MachineProfile:
    @staticmethod
    def from_fields(name: str, fields: Mapping[str, float]) -> MachineProfile: ...
    @property
    def name(self) -> str: ...
    def fields(self) -> dict[str, float]: ...

@final
class CostModel:
    def __init__(
        self,
        profile: MachineProfile,
        expert_bytes: float,
        flops_per_token: float,
        cpu_curve: Sequence[tuple[float, float]] = (),
    ) -> None: ...
    @property
    def profile(self) -> MachineProfile: ...
    @property
    def expert_bytes(self) -> float: ...
    def cpu_expert_us(self, tokens: int) -> float: ...
    def gpu_expert_us(self, tokens: int) -> float: ...
    def upload_us(self) -> float: ...
    def miss_us(self) -> float: ...
    def cpu_us(self, loads: Sequence[int], dma_busy: float = 0.0) -> float: ...
    def gpu_us(self, loads: Sequence[int]) -> float: ...
    def layer(
        self,
        hits: Sequence[int],
        fetched: Sequence[int],
        cpu: Sequence[int],
        backlog_us: float = 0.0,
        queued_us: float = 0.0,
        one_transfer: bool = False,
    ) -> tuple[LayerTimes, list[float]]:
        """And the landing time of each fetched expert."""

@final
class LayerTimes:
    """Predicted times of one layer, in microseconds from its start."""

    @property
    def layer_us(self) -> float: ...
    @property
    def gpu_us(self) -> float: ...
    @property
    def cpu_us(self) -> float: ...
    @property
    def link_us(self) -> float: ...
    @property
    def dma_busy(self) -> float: ...

@final
class DecodePlanner:
    """How many of a layer's misses to fetch, by table."""

    def __init__(
        self,
        cost: CostModel,
        max_routed: int,
        num_buckets: int = 32,
        bucket_us: float = 0.0,
        fetch_cost_us: float = 0.0,
    ) -> None: ...
    @property
    def bucket_us(self) -> float: ...
    @property
    def num_buckets(self) -> int: ...
    def split(self, hits: int, misses: int, backlog_us: float) -> int: ...

@final
class PrefillPlan:
    """Who runs what in one layer, by expert number."""

    @property
    def resident(self) -> list[int]: ...
    @property
    def fetch(self) -> list[int]: ...
    @property
    def cpu(self) -> list[int]: ...
    @property
    def streamed(self) -> bool: ...
    @property
    def times(self) -> LayerTimes: ...

@final
class PrefillPlanner:
    """Plans for layers whose experts carry unequal loads."""

    def __init__(self, cost: CostModel) -> None: ...
    def plan(
        self,
        experts: Sequence[int],
        tokens: Sequence[int],
        resident: Sequence[bool],
        backlog_us: float = 0.0,
        queued_us: float = 0.0,
        max_fetch: int = -1,
    ) -> PrefillPlan: ...

@final
class UploadLane(_NativeEnum):
    DEMAND: ClassVar[UploadLane]
    BACKGROUND: ClassVar[UploadLane]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class Upload:
    """One copy over the link; times are of the virtual clock."""

    @property
    def tag(self) -> int: ...
    @property
    def lane(self) -> UploadLane: ...
    @property
    def queued_us(self) -> float: ...
    @property
    def begin_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...

@final
class Timeline:
    """Virtual clock with a serial link: demand uploads overtake background ones."""

    def __init__(self, upload_us: float) -> None: ...
    @property
    def now_us(self) -> float: ...
    @property
    def backlog_us(self) -> float: ...
    @property
    def queued_us(self) -> float: ...
    @property
    def num_waiting(self) -> int: ...
    def upload(self, tag: int, lane: UploadLane = ..., duration_us: float = -1.0) -> Upload: ...
    def cancel_background(self, tag: int) -> bool: ...
    def advance(self, us: float) -> None: ...
    def take_landed(self) -> list[Upload]: ...
    def drain(self) -> None: ...

# ---- bind_core_cache.cpp: expert caches and policies

def cache_policy_names() -> list[str]: ...
def cache_policy_is_offline(name: str) -> bool: ...
def spread_slots(num_slots: int, num_layers: int, num_experts: int) -> list[int]: ...

@final
class ExpertState(_NativeEnum):
    ABSENT: ClassVar[ExpertState]
    IN_FLIGHT: ClassVar[ExpertState]
    RESIDENT: ClassVar[ExpertState]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class AdmitRefusal(_NativeEnum):
    NONE: ClassVar[AdmitRefusal]
    PRESENT: ClassVar[AdmitRefusal]
    NO_VICTIM: ClassVar[AdmitRefusal]
    PRICE: ClassVar[AdmitRefusal]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class CacheConfig:
    """Shape, slots, policy and price of an expert cache."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        slots_per_layer: Sequence[int],
        policy: str = "payback",
        upload_price: float = 0.67,
        shared_pool: bool | None = None,
        prior_usage: Sequence[float] = (),
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def slots_per_layer(self) -> list[int]: ...
    @property
    def policy(self) -> str: ...
    @property
    def upload_price(self) -> float: ...

@final
class Admission:
    """A slot taken for an upload, and who left it."""

    @property
    def slot(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def evicted_layer(self) -> int: ...
    @property
    def value(self) -> float: ...
    @property
    def victim_value(self) -> float: ...

@final
class ExpertCache:
    """Which experts are in which slots."""

    def __init__(self, config: CacheConfig) -> None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def last_refusal(self) -> AdmitRefusal: ...
    def slot_offset(self, layer: int) -> int: ...
    def num_held(self, layer: int) -> int: ...
    def slot_of(self, layer: int, expert: int) -> int: ...
    def state(self, layer: int, expert: int) -> ExpertState: ...
    def occupant(self, slot: int) -> int: ...
    def observe(self, layer: int, ids: _I32, weights: _F32 | None = None, prefill: bool = False) -> None: ...
    def active(self, arg0: int, /) -> list[int]: ...
    def can_admit(self, layer: int, expert: int, forced: bool = False) -> Admission | None: ...
    def admit(self, layer: int, expert: int, forced: bool = False) -> Admission | None: ...
    def publish(self, slot: int) -> None: ...
    def cancel(self, slot: int) -> None: ...
    def preload(self, layer: int, expert: int) -> bool: ...
    def preload_by_usage(self) -> list[int]: ...
    def boundary(self, num_new: int = 1, num_running: int = 1) -> None: ...
    def value(self, layer: int, expert: int) -> float: ...
    def set_future(self, events_per_layer: Sequence[Sequence[Sequence[int]]]) -> None: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> list[int]: ...

# ---- bind_core_lab.cpp: replay and simulation

@final
class IntEventRing:
    """A bounded lock-free ring of int64 events."""

    def __init__(self, capacity: int) -> None: ...
    def push(self, event: int) -> bool: ...
    def drain(self, arg0: int, /) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def take_dropped(self) -> int: ...

@final
class RoutingTrace:
    """Recorded routing: ids u16[tokens, layers, top_k], checked once."""

    def __init__(
        self, ids: NDArray[np.uint16], weights: _F32 | None, offsets: NDArray[np.int64], num_experts: int
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    def future(self, batch: int) -> list[list[list[int]]]: ...

@final
class ReplayCounts:
    """Sums over one replay; hits and misses count distinct experts per event."""

    @property
    def num_steps(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_events(self) -> int: ...
    @property
    def num_hits(self) -> int: ...
    @property
    def num_misses(self) -> int: ...
    @property
    def num_uploads(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...

@final
class ReplayDecision:
    """What happened to one active expert of one event."""

    @property
    def step(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def hit(self) -> bool: ...
    @property
    def uploaded(self) -> bool: ...
    @property
    def evicted(self) -> int: ...
    @property
    def value(self) -> float: ...
    @property
    def victim_value(self) -> float: ...

def replay(trace: RoutingTrace, batch: int, cache: ExpertCache) -> ReplayCounts: ...
def replay_decisions(
    trace: RoutingTrace, batch: int, cache: ExpertCache
) -> tuple[ReplayCounts, list[ReplayDecision]]: ...

@final
class SimulationResult:
    """Sums over one simulated decode; times in microseconds."""

    @property
    def num_steps(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_hits(self) -> int: ...
    @property
    def num_cpu(self) -> int: ...
    @property
    def num_fetched(self) -> int: ...
    @property
    def num_uploads(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def total_us(self) -> float: ...
    @property
    def moe_us(self) -> float: ...
    @property
    def cpu_us(self) -> float: ...
    @property
    def gpu_us(self) -> float: ...
    @property
    def link_us(self) -> float: ...
    @property
    def layer_us(self) -> _F32: ...

def simulate(
    trace: RoutingTrace,
    batch: int,
    cost: CostModel,
    config: SchedulerConfig,
    dense_us: Sequence[float],
    keep_layer_us: bool = False,
    prompt_chunk: int = 0,
    token_us: Sequence[float] = (),
) -> SimulationResult: ...

# ---- bind_core_scheduler.cpp: a scheduler's configuration, and what it decides

@final
class SchedulerConfig:
    """Shape, slots, policy and rules of a layer scheduler."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_slots: int,
        policy: str = "payback",
        prefetch: bool = False,
        num_staging: int = -1,
        upload_price: float = -1.0,
        stream_ahead_from: int = 33,
        *,
        fetch_rule: str = "best-split",
        background_uploads: bool = True,
        always_cache_fetched: bool = False,
        shared_pool: bool | None = None,
        prior_usage: Sequence[float] = (),
    ) -> None: ...

def default_upload_price(cost: CostModel) -> float: ...

@final
class Placement(_NativeEnum):
    HIT: ClassVar[Placement]
    CPU: ClassVar[Placement]
    FETCHED: ClassVar[Placement]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class UploadReason(_NativeEnum):
    DEMAND: ClassVar[UploadReason]
    ADMISSION: ClassVar[UploadReason]
    PREFETCH: ClassVar[UploadReason]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class ExpertDecision:
    """Where one active expert of a layer runs."""

    @property
    def expert(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def where(self) -> Placement: ...
    @property
    def slot(self) -> int: ...

@final
class Move:
    """One upload that a layer began or queued."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def reason(self) -> UploadReason: ...
    @property
    def begin_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...

@final
class LayerDecision:
    """What was decided for one layer of one step."""

    @property
    def experts(self) -> list[ExpertDecision]: ...
    @property
    def moves(self) -> list[Move]: ...
    @property
    def times(self) -> LayerTimes: ...
    @property
    def start_us(self) -> float: ...
    @property
    def num_withdrawn(self) -> int: ...
    @property
    def arrived(self) -> list[int]: ...

@final
class PrefetchCounts:
    """Sums since the start."""

    @property
    def predicted(self) -> int: ...
    @property
    def correct(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def foreseen(self) -> int: ...
    @property
    def issued(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def wasted(self) -> int: ...
    @property
    def dropped(self) -> int: ...

@final
class LayerScheduler:
    """Decides and plays layers of decode steps."""

    def __init__(self, cost: CostModel, config: SchedulerConfig, link: Timeline) -> None: ...
    def begin_step(self) -> list[int]: ...
    def predict(self, layer: int, logits: _F32) -> None: ...
    def decide(self, layer: int, ids: _I32) -> LayerDecision: ...
    def advance(self, us: float) -> None: ...
    def drain(self) -> None: ...
    @property
    def now_us(self) -> float: ...
    @property
    def link_us(self) -> float: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def prefetch_counts(self) -> PrefetchCounts: ...
    def preload(self, arg0: int, arg1: int, /) -> bool: ...
    def state(self, arg0: int, arg1: int, /) -> ExpertState: ...
    def occupant(self, arg0: int, /) -> int: ...

@final
class LayerCorrection:
    """What predicted times of layers are off by now."""

    def __init__(self, num_layers: int) -> None: ...
    def factor(self, layer: int, num_tokens: int) -> float: ...
    def update(self, layer: int, num_tokens: int, predicted_us: float, measured_us: float) -> None: ...

# ---- bind_ops*.cpp, bind_sampling.cpp: operations on the CPU

def cpu_features() -> dict[str, bool]: ...
def isa_choice() -> tuple[str, str]: ...
def work_times() -> dict[str, float]: ...
def work_of_parts() -> tuple[float, float, float, float, float, float]: ...
def embed(team: ThreadTeam, table: WeightMatrix, token_ids: _I32, out: _F32) -> None: ...
def quantise_rows(
    team: ThreadTeam, x: _F32, format: str, importance: _F32 | None = None
) -> NDArray[np.uint8]: ...

@final
class ThreadTeam:
    def __init__(self, num_threads: int = 0, numa: str = "off", sysfs: str = "/sys") -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def placement(self) -> list[tuple[int, list[int]]]: ...
    def bind_caller(self) -> None: ...

@final
class TokenRules:
    """What one request changes of its logits before a token is picked; `take` tells it the answer's tokens."""

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

def pick_tokens(
    team: ThreadTeam, logits: _F32, draws: NDArray[np.float64], rules: Sequence[TokenRules | None]
) -> NDArray[np.int32]:
    """Tokens [R] of logits [R, vocabulary], which are changed meanwhile and restored. draws [R, 5]: temperature, top-k,
    top-p, min-p, uniform number."""

def log_probabilities(
    team: ThreadTeam, logits: _F32, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """For each query the token asked for and the likeliest ones of its row, with their log softmax in float64."""

@final
class PackedMatrix:
    def __init__(self, team: ThreadTeam, parts: Sequence[WeightMatrix]) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def formats(self) -> list[str]: ...

@final
class StateCache:
    """What sequences keep between steps, in pages. Of each layer: (planes, elements per token, dtype), ..."""

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[int, int, Literal["float32", "bfloat16"]]]],
        num_pages: int,
        page_size: int,
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class AttentionBatch:
    def __init__(
        self, positions: _I32, sequence_index: _I32, page_tables: _I32, rope_cos: _F32, rope_sin: _F32
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...

class Block:
    """Part of a layer: adds to the residual stream."""

    @property
    def hidden_size(self) -> int: ...

@final
class Gqa(Block):
    def __init__(
        self,
        team: ThreadTeam,
        norm_weight: _F32,
        qkv_weight: PackedMatrix,
        qkv_bias: _F32 | None,
        q_norm: _F32 | None,
        k_norm: _F32 | None,
        o_weight: PackedMatrix,
        o_bias: _F32 | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        sliding_window: int | None,
        layer: int,
    ) -> None:
        """layer: of the cache, which has 2 * num_kv_heads planes of head_dim elements there."""

    def forward(self, hidden: _F32, batch: AttentionBatch, cache: StateCache) -> None: ...

@final
class Mla(Block):
    """Multi-head latent attention, absorbed."""

    def __init__(
        self,
        team: ThreadTeam,
        norm_weight: _F32,
        a_weight: PackedMatrix,
        a_bias: _F32 | None,
        q_norm: _F32 | None,
        q_b_weight: PackedMatrix | None,
        latent_norm: _F32,
        k_b_weight: PackedMatrix,
        v_b_weight: PackedMatrix,
        o_weight: PackedMatrix,
        o_bias: _F32 | None,
        *,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        eps: float,
        latent_eps: float,
        scale: float,
        neighbours: bool,
        layer: int,
    ) -> None:
        """a_weight: queries or, with q_norm and q_b_weight, their low-rank part, then latent and shared key. k_b_weight
        and v_b_weight have a part for each head: [latent, nope_dim] and [value_dim, latent]. neighbours: rotation pairs
        (2i, 2i + 1). layer: of the cache, which has one plane of latent + rope_dim elements there."""

    def forward(self, hidden: _F32, batch: AttentionBatch, cache: StateCache) -> None: ...

@final
class RouterShape:
    """How a router turns logits into choice and weights: score, choice (by score and bias, within the best groups),
    weights divided by their sum, times scale."""

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
    ) -> None: ...

@final
class Router(Block):
    def __init__(
        self,
        team: ThreadTeam,
        norm_weight: _F32,
        gate_weight: _PlainMatrix,
        eps: float,
        shape: RouterShape,
        bias: _F32 | None = None,
    ) -> None:
        """bias [experts]: added to scores for choosing only."""

    def forward(
        self, hidden: _F32, normed: _F32, ids: _I32, weights: _F32, logits: _F32 | None = None
    ) -> None: ...

@final
class RoutedExperts(Block):
    """The experts that the router before it chose, wherever the executor runs them."""

    def __init__(self, hidden_size: int, moe_layer: int) -> None: ...

@final
class SharedExperts(Block):
    """A feed-forward of the router's normed rows, times sigmoid(shared_gate [hidden] . row) if there is one."""

    def __init__(
        self,
        team: ThreadTeam,
        gate: PackedMatrix,
        up: PackedMatrix,
        down: PackedMatrix,
        shared_gate: _F32 | None = None,
    ) -> None: ...
    def forward(self, hidden: _F32, normed: _F32) -> None: ...

@final
class DenseFfn(Block):
    def __init__(
        self,
        team: ThreadTeam,
        norm_weight: _F32,
        gate: PackedMatrix,
        up: PackedMatrix,
        down: PackedMatrix,
        eps: float,
    ) -> None: ...
    def forward(self, hidden: _F32) -> None: ...

@final
class Decoder:
    def __init__(self, blocks: Sequence[Block]) -> None: ...
    def forward(
        self, hidden: _F32, batch: AttentionBatch, cache: StateCache, experts: MoeExecutor | None
    ) -> None:
        """experts: None where no block has any."""

@final
class LmHead:
    def __init__(self, team: ThreadTeam, norm_weight: _F32, weight: PackedMatrix, eps: float) -> None: ...
    def forward(self, hidden_rows: _F32, logits: _F32) -> None: ...

# ---- bind_runtime.cpp: experts and what runs them

def slot_stride(largest_expert_bytes: int) -> int: ...

@final
class CacheEventKind(_NativeEnum):
    ADMIT: ClassVar[CacheEventKind]
    EVICT: ClassVar[CacheEventKind]
    REJECT: ClassVar[CacheEventKind]
    PUBLISH: ClassVar[CacheEventKind]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class ExpertStore:
    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        formats: Sequence[tuple[str, str, str]],
        huge_pages: bool = True,
    ) -> None: ...
    def put(
        self,
        team: ThreadTeam,
        layer: int,
        first: int,
        experts: Sequence[tuple[WeightMatrix, WeightMatrix, WeightMatrix]],
    ) -> None: ...
    def formats(self, layer: int) -> tuple[str, str, str]: ...
    def offset(self, layer: int) -> int: ...
    def stride(self, layer: int) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def flops_per_token(self) -> float: ...

class SlottedAccelerator:
    """Made by a module that has devices (twofold._cuda)."""

@final
class PlacedGroups:
    experts: _I32
    begin: _I32
    pairs: _I32
    addresses: NDArray[np.int64]
    def __len__(self) -> int: ...

@final
class LayerPlan:
    ready: PlacedGroups
    awaited: PlacedGroups
    on_cpu: PlacedGroups
    where: _U8

@final
class MoeExecutor:
    def __init__(self, team: ThreadTeam, store: ExpertStore, cost: CostModel | None = None) -> None: ...
    @staticmethod
    def emulated(
        team: ThreadTeam,
        store: ExpertStore,
        cost: CostModel,
        config: SchedulerConfig,
        dense_bytes: list[float],
        dense_flops: list[float],
        preload: bool,
        router_bytes: float = 0.0,
    ) -> MoeExecutor: ...
    @staticmethod
    def on_device(
        team: ThreadTeam, store: ExpertStore, accelerator: SlottedAccelerator, preload: bool = False
    ) -> MoeExecutor: ...
    def begin_step(self, step: int, requests: Sequence[int], positions: Sequence[int]) -> None: ...
    def forward(self, layer: int, normed: _F32, ids: _I32, weights: _F32, hidden: _F32) -> None: ...
    def begin_layer(self, layer: int, ids: _I32, weights: _F32) -> LayerPlan: ...
    def compute_cpu(self, normed: _F32, rows: _F32) -> None: ...
    def end_layer(self, us: float, dense_us: float = -1.0) -> None: ...
    def follow(self, layer: int, ids: _I32, weights: _F32, where: _U8, us: float) -> None: ...
    @property
    def wants_prediction(self) -> bool: ...
    def predict(self, layer: int, logits: _F32) -> None: ...
    def save_cache(self, path: str) -> None: ...
    def restore_cache(self, path: str) -> int: ...
    def prefetch_counts(self) -> dict[str, int]: ...
    def end_step(self) -> None: ...
    def idle(self) -> None: ...
    events_enabled: bool
    def clock_parts(self) -> tuple[float, float, float, float, float]: ...
    @property
    def virtual_now_us(self) -> float | None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    def counts(self) -> dict[str, int]: ...
    def drain_events(self) -> dict[str, NDArray[Any]]: ...
    def take_dropped(self) -> dict[str, int]: ...
