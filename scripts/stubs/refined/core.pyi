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
    def with_devices(self):
        """This machine with the devices of others beside its own, at this host."""

class CachePolicy:
    """One entry of the registry of cache policies."""

    prefetches: Final[Literal["auto", "asked", "never"]]

def scheduler_options() -> dict[str, SchedulerOption]:
    """Options of SchedulerConfig by name, as declared in engine/core/include/twofold/scheduler_options.h."""

class SchedulerConfig:
    def __init__(self):
        """slots: of the machine's only device, or of each. options: see scheduler_options.

        Raises:
            TypeError: no option has that name, or it has another type."""

def count_meanings() -> dict[str, tuple[str, dict[str, str]]]:
    """By group, what is counted and the meaning of each counter, as declared in
    engine/core/include/twofold/counters.h."""

class LayerScheduler:
    """Schedules and plays the layers of decode steps."""

    def counts(self) -> dict[str, dict[str, int]]: ...

def runnable_levels():
    """ISA levels of kernels, by name, best last."""

def left_out_levels():
    """Levels that this CPU can run and this build leaves out (TWOFOLD_LEVELS)."""

def embed(table: WeightMatrix, token_ids: _I32, out: _F32): ...
def weight_formats() -> dict[str, tuple[int, int, int, int, int, int, str, bool]]: ...
def pack_panels(matrix: WeightMatrix): ...
def expect_finite(matrix: WeightMatrix): ...
def quantise_rows(x: _F32, importance: _F32 | None): ...

class ThreadPool:
    """Threads that work on one operation at a time, and the ISA level of operators created on it."""

    def at_level(self):
        """The same threads, for operators with kernels of another level. ConfigError if this CPU cannot run it."""
    placement: Final[list[tuple[int, list[int]]]]

    def limit(self):
        """Set the number of threads for operations; 0: all. ConfigError with several memory nodes."""

class TokenRules:
    """One request's changes to its logits before sampling; `take` adds the answer's tokens."""

def pick_tokens(logits: _F32, rules: Sequence[TokenRules | None]):
    """Sampled tokens [R] of logits [R, vocabulary], which are modified temporarily. draws [R, 5]: temperature, top-k,
    top-p, min-p, uniform number."""

def mask_logits(logits: _F32):
    """Set logits[rows[i]] [vocabulary] to -inf where the bit in masks[i] [at least ceil(vocabulary / 32)] is 0. The
    lowest bit of the first word is token 0."""

def log_probabilities(logits: _F32):
    """Per query the requested token and the likeliest ones of its row, with their log softmax in float64."""

def panel_layout():
    """Identifier of this build's panel layout; panels are readable only by builds with the same identifier."""

class FileMapping:
    """A read-only memory-mapped file; all processes that map it share its pages. Calls raise OSError."""

    def __init__(self, path: bytes): ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def change(self):
        """What happened to the file if it was written to or became shorter since; empty while it was not."""

class Ranks:
    """Processes that each hold a share of one model's weights; rank 0 computes the model.

    send_job(to, job, rows) and receive(from, rows) are called by native code with the bytes to send, and those to
    fill."""

    def __init__(
        self,
        send_job: Callable[[int, memoryview, memoryview], None],
        receive: Callable[[int, memoryview], None],
    ): ...
    def ping(self):
        """Ask every rank for a sign of life, unless a job is running. Raises KernelError if one is lost."""

class PackedMatrix:
    def __init__(self, parts: Sequence[WeightMatrix]):
        """ranks: pack this rank's share of matrix `number`; without a number, the whole matrix on rank 0 alone."""

class StateCache:
    """Paged state of sequences between steps. Per layer: (planes, elements per token, dtype), ..."""

    def __init__(
        self, layers: Sequence[Sequence[tuple[int, int, Literal["float32", "bfloat16", "q8", "fp8"]]]]
    ):
        """record_bytes: bytes of a sequence's record in each layer; empty: no layer has records."""

    def fork_page(self):
        """Copy one page to another, in all layers. IndexError for a page that does not exist."""

    def read_page(self):
        """One page's rows of all layers, to be written back later to any page."""

    def write_page(self):
        """ValueError: the bytes are not a page of these layers."""

    def resize(self):
        """Set the number of pages; page kept[p] gets the content of p. Raises ConfigFailure without memory, IndexError
        for a page that does not exist; then nothing has changed."""

class AttentionBatch:
    def __init__(
        self,
        positions: _I32,
        sequence_index: _I32,
        page_tables: _I32,
        rope_cos: _F32,
        rope_sin: _F32,
        records: _I32 | None,
    ):
        """records: number of each sequence's record, if layers have records."""

    @staticmethod
    def of_table(
        positions: _I32,
        sequence_index: _I32,
        page_tables: _I32,
        cos_table: _F32,
        sin_table: _F32,
        records: _I32 | None,
    ): ...
    def add_rotation(self, rope_cos: _F32, rope_sin: _F32):
        """Add a rotation for layers with a different one; rope_cos, rope_sin [T, its rotated pairs]."""

    def keep_records(self, numbers: _I32):
        """Records that receive the layers' state after each token, [T]; -1: none. For the verification of drafts."""

    def see_until(self, ends: _I32):
        """Position after the last one that each token attends to in bidirectional layers, [T]: tokens of a picture
        attend to one another."""

class Stretch:
    """One stretch of positions that a query attends to: the last ones, those of its chunk, or (0) all."""

class ScoreRule:
    """The scale and bounds of a score (kernels/include/twofold/attention_parts.h)."""

class Chooser:
    """Chooses positions for the queries of a layer (engine/runtime/ops/attention/parts/selection.h)."""

class Indexer:
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

class Gqa:
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
                gate follows its query; else rows: 1 or value_dim rows per head after all values.
        """

class GatedDelta:
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
            tiled: value head h uses key head h % num_k_heads; otherwise the value heads of a key head are adjacent.
        """

class ShortConvolution:
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

class Mla:
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

class RouterShape:
    """How a router turns logits into experts and weights: score, choice (by score and bias, within the best groups;
    zero_others: those of other groups by a score of 0), weights divided by their sum, times scale."""

    def __init__(
        self,
        score: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"],
        group_score: Literal["max", "top_two_sum"],
    ): ...

class Router:
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

        pictures_gate, pictures_bias: of rows of pictures, to as many experts after those of gate_weight.
        """

class RoutedExperts:
    """The experts chosen by the preceding router, run wherever the executor places them."""

    def __init__(self):
        """weighs_rows: a token's weight multiplies the input of its one expert, not the output."""

class SharedExperts:
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

class DenseFfn:
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

class MtpInput:
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

class LayerInput:
    """Adds projection . (gelu(gate . hidden) * input), the input being a part of the step's `layer_inputs`."""

    def __init__(self, pool: ThreadPool, *, gate: PackedMatrix, projection: PackedMatrix, first: int) -> None:
        """first: where the layer's input begins in a row of the step's."""

class GatedNorm:
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

class NgramInput:
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

class HyperConnection:
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

class StreamHead:
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

class PostNorm:
    """The `over` preceding blocks add to rows of zeros; their norm is added to the residual, and all is scaled."""

    def __init__(
        self, pool: ThreadPool, *, norm_weight: _F32, eps: float, over: int, scale: float = 1.0
    ) -> None: ...

class Decoder:
    def __init__(self, blocks: Sequence[Block]):
        """threads: pool threads per block; 0 or an empty list: all."""

    def forward(self, hidden: _F32, previous: _F32 | None, layer_inputs: _F32 | None):
        """experts: None if no block has any. previous: [T, streams * hidden], normed hidden states, or streams, that a
        `MtpInput` reads.

        layer_inputs: result of `LayerInputs.forward` for the batch's tokens, which a `LayerInput` reads."""

    streams: Final[_F32]

class Embedding:
    def __init__(self, table: WeightMatrix): ...
    def forward(self, token_ids: _I32, out: _F32): ...

class RowTable:
    """Rows of a table that stays in its file, cached up to a bound of bytes."""

    def __init__(self, parts: Sequence[WeightMatrix]):
        """parts: the table's rows in order; those that are not in a mapped file are read in place."""

    def read(self, ids: _I64, out: _F32):
        """out[t, first:] becomes rows ids[t], one after the other. KernelError for one with a NaN or an infinity."""

    def read_ahead(self, ids: _I64):
        """Asks the system to read rows that are not cached. From any thread."""
    bytes: Final[int]
    """Bytes of the whole table."""
    cache_bytes: Final[int]
    """Most bytes of cached rows."""
    num_slots: Final[int]
    """Most rows that are cached."""
    num_reads: Final[int]
    """Rows read so far."""
    num_hits: Final[int]
    """Cache hits among `num_reads`."""

class LayerInputs:
    """Inputs of all layers, by a table of tokens and a projection of their embeddings."""

    def __init__(self, norm_weight: _F32): ...
    def forward(self, token_ids: _I64, hidden: _F32, out: _F32):
        """hidden [T, hidden]: scaled embeddings; out [T, layers * size]."""

class LmHead:
    def __init__(self, norm_weight: _F32 | None):
        """norm_weight: None: hidden states are read as they are. softcap: logits become
        softcap * tanh(logits / softcap); 0: they stay."""

    def forward(self, hidden_rows: _F32, logits: _F32): ...
    def norm(self, hidden_rows: _F32, out: _F32):
        """The rows that the matrix is multiplied with; out may be hidden_rows."""

    def with_norm(self, norm_weight: _F32): ...

def event_formats() -> dict[str, tuple[np.dtype[Any], dict[str, str]]]:
    """By kind of event, the dtype of its arrays and the meaning of each field."""

class ExpertStore:
    def __init__(self, formats: Sequence[LayerFormats]):
        """formats: of each layer's experts, for all or for each. second_half: intermediate size of the second half of
        them; 0: as the first half's.

        limits: of the activation (kernels/include/twofold/expert.h), one per layer, 0 for none; or none at all.

        ranks: hold this rank's experts alone. holders: bit masks of the ranks of each expert, [layers * experts]."""

    @staticmethod
    def from_file(formats: Sequence[LayerFormats]): ...
    def offsets(self):
        """Offset of each expert of the layer, in bytes from the begin of the store; -1: not held by this process."""
    def put(self, experts: Sequence[tuple[WeightMatrix, WeightMatrix, WeightMatrix]]): ...

class SlottedAccelerator:
    """Created by a module with devices (twofold._cuda)."""

class RankWorker:
    def __init__(self, experts: ExpertStore | None): ...
    def run(self):
        """The answer [numbers] to a job, given the rows sent with it [numbers]. Raises ValueError for a damaged job."""

class ExpertTraining:
    def forward(
        self, factors: Sequence[tuple[NDArray[Any], NDArray[Any], float] | None]
    ) -> tuple[_F32, KeptRows]: ...
    def backward(
        self, factors: Sequence[tuple[NDArray[Any], NDArray[Any], float] | None]
    ) -> tuple[_F32, _F32, list[tuple[_F32, _F32] | None]]: ...

class DeviceAccelerator:
    """Expert slots on a device, with uploads in real time. Addresses are the device's."""

class RoutingCounts:
    def take(self):
        """[placements, layers, experts] since the last take."""

    def take_step(self) -> dict[str, Any] | None:
        """The last step's number, requests and positions [tokens], experts and placement [layers, tokens, top_k]."""

class DenseCost:
    """Work beside the routed experts: entry i runs before MoE layer i, the last one after the last MoE layer.

    cpu_bytes, cpu_flops_per_token: the CPU's part of each stretch, in none of the other figures; handovers: its
    transfers of the residual stream. Empty: none. router_bytes: one router's gate."""

class MoeExecutor:
    def begin_step(self):
        """verified: rows of a next token and its drafts, which are decode tokens; empty: none. is_recorded: False for a
        drafter's pass, whose routing is neither counted nor an event. pictures: rows with experts of pictures; empty:
        none."""

    def record_release(self):
        """Record that all experts leave their slots. Returns the number of the last step, -1 if there was none."""

    def place_experts(self):
        """Make exactly these experts resident, [layers, experts]; call between steps. Returns the number of uploads."""

    def scheduler_counts(self) -> dict[str, dict[str, int]]:
        """By group, see count_meanings."""
    def end_step(self):
        """with_head: False where no logits were computed."""

    def placement(self) -> tuple[_U8, _F64] | None:
        """[layers, experts] state (0 absent, 1 in flight, 2 resident) and policy score; None without slots."""

    def placement_devices(self) -> _I8 | None:
        """[layers, experts] device that holds the expert, the first of several; -1: none. None without slots."""

    def counts(self) -> dict[str, int]: ...
    def drain_events(self) -> dict[str, NDArray[Any]]: ...
    def take_dropped(self) -> dict[str, int]: ...
