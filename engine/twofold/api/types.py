"""Values that cross module borders: requests, what comes back, and what a step did.

Plain frozen dataclasses and named tuples without behaviour; of ours it imports `api` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from twofold.api.constraints import CompiledConstraint

FinishReason = Literal["stop", "length", "cancelled", "error"]
Clock = Literal["wall", "virtual"]


@dataclass(frozen=True)
class SamplingParams:
    """How to pick the next token. Defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    """None: until the context is full. 0: nothing is generated; what `prompt_logprobs` asks of the prompt is still
    given."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """End the answer like the end-of-text token does, and have no text either."""
    min_tokens: int = 0
    """Tokens before which neither an end-of-text token nor one of `stop_token_ids` can be picked. Stop strings end
    the answer whenever they come."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added to its logit before the penalties), each token once."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token cannot be picked right behind the others, the prompt's end included."""
    logprobs: int | None = None
    """Most likely tokens to report beside each picked one; 0: the picked one alone; None: report nothing."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log probability under the model alone: softmax of the raw logits, before any
    penalty, bias, temperature or filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log probability) of the most likely ones, descending; of equals the lower token first."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one token besides its logits: the filters, and where in the distribution to look."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    """In [0, 1), from the request's own generator; 0 where nothing is left to chance."""


class Chunk(NamedTuple):
    """One piece of an answer, given to `GenerationRequest.on_chunk` in order; the last has a finish reason.

    A named tuple, because one is made for every token: a frozen dataclass takes three times as long.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """Present on the last chunk only."""
    error: str | None = None
    """Present when finish_reason is "error"."""
    routed_experts: npt.NDArray[Any] | None = None
    """On the last chunk, if the request asked: uint8 or uint16 [tokens computed, MoE layers, top_k]."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if the request asked."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first chunk, if the request asked: one per prompt token, None for the first."""
    stopped_by: str | None = None
    """On the last chunk: which of `SamplingParams.stop` ended the answer."""


@dataclass(frozen=True)
class Usage:
    """Counts and times of one finished request. Times are seconds of the run's clock (see `clock`)."""

    prompt_tokens: int
    completion_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    clock: Clock = "wall"
    cached_tokens: int = 0
    """Of the prompt's, found in the prefix cache."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, ready tokenised, and where its answer goes.

    `on_chunk` is called on the engine's thread and must return at once (put it on a queue, post it to a loop).
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    on_chunk: Callable[[Chunk], None]
    request_id: str
    """The caller's name for it, e.g. "chatcmpl-…"; unique."""
    model: str = ""
    endpoint: str = ""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that the text shows all the same, for who reads marks of calls and of thinking in it."""
    constraint: CompiledConstraint | None = None
    """What the answer must match; the engine that is asked has compiled it."""
    return_routed_experts: bool = False
    """Give the experts of every token back with the last chunk (prompt and answer but its last token)."""
    cache_salt: str = ""
    """Only requests with the same share what they have in common in the prefix cache."""
    turn_ends: tuple[int, ...] = ()
    """Ascending numbers of prompt tokens behind which other prompts may go on otherwise: where the last message begins,
    where the answer does. Empty: unknown."""
    priority: int = 0
    """Lower is earlier, where the engine schedules by priority; 0 elsewhere."""
    after_step: Callable[[], None] | None = None
    """Called on the engine's thread after a step that gave this request a chunk, or more; once for all requests of the
    step that have the same, so that whoever waits for several of them is woken once. Must return at once, too."""


@dataclass(frozen=True)
class PlacementCounts:
    """Where routed experts ran, summed over tokens and layers, and what moved."""

    hits: int = 0
    cpu_misses: int = 0
    fetched: int = 0
    uploads: int = 0
    evictions: int = 0
    h2d_bytes: int = 0
    deferred: int = 0
    """Of those that the CPU ran (`--num-deferred-experts`)."""


@dataclass(frozen=True)
class PrefetchCounts:
    """What prefetching foresaw and did, in experts per layer and step, summed.

    Precision is correct / predicted, recall on misses foreseen / misses, issued = used + late + wasted + under way.
    """

    predicted: int = 0
    correct: int = 0
    misses: int = 0
    """Routed experts that were not in a slot, and no upload under way, when their layer was predicted."""
    foreseen: int = 0
    issued: int = 0
    used: int = 0
    """Routed, and landed in time: hits that would have been misses."""
    late: int = 0
    wasted: int = 0
    """Not routed by the layer they came for; they stay cached and may serve later steps."""
    dropped: int = 0
    """Worth an upload that could not have landed in time."""


@dataclass(frozen=True)
class MappedWeights:
    """Weights that are computed from in a file's pages."""

    mapped_bytes: int
    resident_bytes: int
    """Brought into memory since the start; what of the others a step touches is read then."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for people and health checks."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_free_records: int
    num_records: int
    """Of sequences as a whole; 0 for a model whose layers keep none."""
    num_steps: int
    decode_tokens_per_s: float
    """Of recent decode-only steps, on the run's clock; 0 before the first."""
    clock: Clock
    placement: PlacementCounts
    draining: bool
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked for in the prefix cache, since the start."""
    prefix_cache_hits: int = 0
    """Of these, found."""
    prefetch: PrefetchCounts = field(default_factory=PrefetchCounts)
    dynamic_update: Mapping[str, int] = field(default_factory=dict)
    """Steps with prompt tokens by what they came to, where --enable-dynamic-expert-update was given."""


class RequestProgress(NamedTuple):
    """How far the engine is with one request."""

    request: GenerationRequest
    number: int
    """In order of arrival."""
    max_tokens: int
    is_running: bool
    """It has a place; else it waits for one, maybe again."""
    num_computed: int
    """Leading tokens, of the prompt first, whose keys and values are in the cache."""
    num_generated: int
    num_cached: int = 0
    """Of the prompt's, found in the prefix cache."""
    submitted_s: float = 0.0
    """Unix time."""


@dataclass(frozen=True)
class MemorySplit:
    """What there is for experts and for what sequences keep."""

    num_slots: int
    """For experts, over all layers."""
    num_staging: int
    """Slots that fetched experts pass through; -1: room for one whole layer."""
    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""


@dataclass(frozen=True)
class Resize:
    """Another split, by the words of `EngineConfig`; what is None stays as it is."""

    gpu_experts_ratio: float | None = None
    num_gpu_experts: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Who has how much, in bytes where the name says so."""

    num_slots: int
    slots_bytes: int
    """With staging slots; in host memory where the device is emulated."""
    num_pages: int
    page_bytes: int
    """Of one page, all layers."""
    page_size: int
    """Tokens of one page."""
    num_free_pages: int
    """Nobody runs with them; cached ones count."""
    num_cached_pages: int
    """What is kept of texts; those that somebody runs with, too."""
    num_snapshots: int
    """Records in the prefix cache."""
    record_bytes: int
    """Of one, all layers."""
    max_context: int


class LayerPlacement(NamedTuple):
    """Which experts of one MoE layer are in slots."""

    layer: int
    """Among MoE layers."""
    num_resident: int
    experts: tuple[tuple[int, str, float], ...]
    """(expert, "resident", "in flight" or "absent", worth by the policy), the worthiest first."""


class ExpertPlacement(NamedTuple):
    """Which experts are in slots, and what has put them there."""

    resident: tuple[tuple[int, ...], ...]
    """Of each MoE layer, ascending."""
    num_experts: int
    """Of a layer."""
    num_slots: int
    strategy: str
    policy: str
    is_static: bool
    """No policy moves experts."""
    dynamic_update: Mapping[str, int]
    """See `EngineStats`."""


class StepParts(NamedTuple):
    """Where the wall's time of a step went, in microseconds; Python between them is what is left of
    `StepRecord.wall_us`.

    On a device that computes the dense part itself, `attention_us` is what lies between two layers' experts (attention,
    router) and `head_us` all before the first and behind the last.
    """

    schedule_us: float = 0.0
    """Requests taken in, the step's tokens chosen."""
    batch_us: float = 0.0
    """The batch put together."""
    embed_us: float = 0.0
    attention_us: float = 0.0
    router_us: float = 0.0
    dense_ffn_us: float = 0.0
    """Feed-forward layers without experts."""
    experts_cpu_us: float = 0.0
    """Beyond what the GPU took where it computes too."""
    experts_gpu_us: float = 0.0
    head_us: float = 0.0
    sampling_us: float = 0.0
    emit_us: float = 0.0
    """Tokens made text and handed out."""
    telemetry_us: float = 0.0
    """The step before written down."""


class EmulatedParts(NamedTuple):
    """Where the virtual clock's time of a step went, in microseconds that sum to `StepRecord.step_us`."""

    dense_us: float
    """Embedding, attention, routers, on the GPU."""
    experts_gpu_us: float
    experts_cpu_us: float
    """As far as layers waited for the CPU longer than the GPU computed."""
    link_us: float
    """As far as layers waited for uploads."""
    head_us: float


@dataclass(frozen=True)
class StepRecord:
    """One engine iteration, for telemetry. Times are of the run's clock, `wall_us` always of the wall."""

    step: int
    started_s: float
    """Unix time."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    step_us: float
    wall_us: float
    """From the step's begin, requests taken in, until its answers were handed out, and what the writing down of the
    step before took."""
    parts: StepParts = field(default_factory=StepParts)
    emulated: EmulatedParts | None = None
    """On a virtual clock only."""


@dataclass(frozen=True)
class RequestRecord:
    """One request as telemetry keeps it. `number` is what native events refer to."""

    number: int
    request_id: str
    endpoint: str
    submitted_s: float
    """Unix time."""
    first_token_s: float | None
    finished_s: float | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cached_tokens: int = 0
    """Of the prompt's, found in the prefix cache."""


@dataclass(frozen=True)
class ControlRecord:
    """Somebody changed a running engine: what there is from then on."""

    at_s: float
    """Unix time."""
    kind: Literal["resize", "sleep", "wake"]
    num_slots: int
    num_pages: int


@dataclass(frozen=True)
class RunInfo:
    """What one process lifetime is: the row of table `run` that everything else refers to."""

    model: str
    architecture: str
    accelerator: str
    """"none", "cuda:0" or "emulated:<profile>"."""
    accelerator_reason: str
    clock: Clock
    policy: str
    num_layers: int
    num_experts: int
    top_k: int
    num_slots: int
    expert_bytes: int
    cpu_isa: str
    cpu_threads: int
    version: str
    config_json: str
    output_changes: tuple[str, ...] = ()
    """Settings that were asked for and change answers (expert deferral, cache-aware routing): what they come to."""
