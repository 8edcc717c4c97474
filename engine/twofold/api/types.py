"""Values that cross module borders: requests, results and step records.

Plain frozen dataclasses and named tuples without behaviour. Imports only `api` modules. Telemetry stores the fields of
records that are numbers, texts or flags as columns; the text of `Annotated` is the column's meaning in its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy.typing as npt

from twofold.api.constraints import CompiledConstraint
from twofold.api.media import PromptMedia
from twofold.api.pooling import Pooling
from twofold.api.request_origin import DIRECT, RequestOrigin
from twofold.api.request_times import RequestTimes

FinishReason = Literal["stop", "length", "cancelled", "error"]
Clock = Literal["wall", "virtual"]
RunKind = Literal["serving", "training"]


@dataclass(frozen=True)
class SamplingParams:
    """How to pick the next token. The defaults are greedy."""

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
    """None: until the context is full. 0: generate nothing, but still report `prompt_logprobs`."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer as the end-of-text token does; they produce no text either."""
    min_tokens: int = 0
    """Until the answer has this many tokens, neither an end-of-text token nor one of `stop_token_ids` can be picked.
    Stop strings end the answer at any time."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias added to its logit before the penalties); each token once."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token cannot be picked directly after the others, counting the end of the prompt."""
    logprobs: int | None = None
    """Number of most likely tokens to report beside each picked one. 0: only the picked one; None: report nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log probability: softmax of the model's raw logits, before any penalty, bias, temperature
    or filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log probability) of the most likely tokens, descending; ties by lower token id."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything that decides one token besides its logits: the filters and the uniform random number."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    """In [0, 1), from the request's own generator; 0 for greedy decoding."""


class Chunk(NamedTuple):
    """One piece of an answer, passed to `GenerationRequest.on_chunk` in order; the last one has a finish reason.

    A named tuple: one is made per token, and a frozen dataclass takes three times as long.
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
    """One entry per token of `token_ids`, if the request asked."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first chunk, if the request asked: one per prompt token, None for the first."""
    stopped_by: str | None = None
    """On the last chunk: which of `SamplingParams.stop` ended the answer."""
    pooled: npt.NDArray[Any] | None = None
    """On the last chunk, if the request asked: f32, see `Pooling`."""


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
    """Prefix-cache hits among the prompt tokens."""
    image_tokens: int = 0
    """Prompt tokens that stand for rows of pictures."""
    wall_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Queue, prefill and decode time in wall-clock seconds, whatever `clock` is."""
    max_tokens: int = 0
    """Most tokens the answer was allowed to have."""
    accepted_prediction_tokens: int = 0
    """Tokens of `GenerationRequest.prediction` that were drafted and accepted."""
    rejected_prediction_tokens: int = 0
    """The prediction's other tokens."""


def _drop(chunk: Chunk) -> None:
    """Receiver of a template's answer, which has none."""


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter that an engine has loaded."""

    name: str
    number: int
    """Its number in native code."""
    digest: str
    """SHA-256 of its files, hexadecimal: only requests with the same weights share prefix-cache pages."""
    path: str = ""
    rank: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """A tokenised prompt and the callback that receives its answer.

    Without a prompt it is a template: `dataclasses.replace` makes the requests from it.
    `on_chunk` runs on the engine's thread and must return at once (put the chunk on a queue, post it to a loop).
    """

    prompt_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    on_chunk: Callable[[Chunk], None] = _drop
    request_id: str = ""
    """Unique name given by the caller, e.g. "chatcmpl-…"."""
    model: str = ""
    endpoint: str = ""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens to keep in the text, for parsers of tool calls and reasoning content."""
    constraint: CompiledConstraint | None = None
    """Constraint of the answer; compiled by the engine that serves the request."""
    return_routed_experts: bool = False
    """Return the routed experts of every token on the last chunk (prompt and answer without its last token)."""
    cache_salt: str = ""
    """Only requests with the same salt share prefix-cache pages."""
    adapter: LoadedAdapter | None = None
    """The adapter that the model computes the request with; None: none."""
    turn_ends: tuple[int, ...] = ()
    """Ascending prompt lengths after which other prompts may diverge: start of the last message, start of the answer.
    Empty: unknown."""
    prefix_labels: tuple[bytes, ...] = ()
    """A router's names of the prompt's prefixes, shortest first. The prefix cache remembers them with its pages."""
    media: PromptMedia | None = None
    """Pictures of the prompt; None: none. Their rows are complete: encoding is not the engine's work."""
    prediction: tuple[int, ...] = ()
    """Tokens that the answer is expected to resemble; a draft, which never changes the answer."""
    priority: int = 0
    """Lower is earlier, where the engine schedules by priority; must be 0 elsewhere."""
    after_step: Callable[[], None] | None = None
    """Called on the engine's thread after a step that gave this request at least one chunk. Called once for all
    requests of the step with the same callable, so that a thread waiting for several requests wakes once. Must return
    at once."""
    origin: RequestOrigin = DIRECT
    pooling: Pooling | None = None
    """One vector of the prompt is wanted instead of an answer; `SamplingParams.max_tokens` is 0 then."""
    times: RequestTimes | None = None
    """Wall times of the request before its submission. Its queue time begins where they end; None: at submission."""


@dataclass(frozen=True)
class PlacementCounts:
    """Where routed experts ran and what was copied, summed over tokens and layers."""

    hits: int = 0
    cpu_misses: int = 0
    fetched: int = 0
    uploads: int = 0
    evictions: int = 0
    h2d_bytes: int = 0
    deferred: int = 0
    """Deferred experts among those run by the CPU (`--num-deferred-experts`)."""


@dataclass(frozen=True)
class SpeculationCounts:
    """Speculative decoding since the start, in vLLM's terms."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """Accepted tokens by their position in the draft."""
    predicted_s: float = field(default=0.0, compare=False)
    """Time of steps with drafts that had a price, as it predicted them, on the run's clock."""
    measured_s: float = field(default=0.0, compare=False)
    """Time that these steps took."""


@dataclass(frozen=True)
class MappedWeights:
    """Weights computed from directly in a memory-mapped file."""

    mapped_bytes: int
    resident_bytes: int
    """Loaded into memory since the start; the remaining pages are read when a step touches them."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine for display and health checks."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_free_records: int
    num_records: int
    """Records for whole sequences (recurrent state); 0 for a model whose layers keep none."""
    num_steps: int
    decode_tokens_per_s: float
    """Speed of recent decode-only steps, on the run's clock; 0 before the first."""
    clock: Clock
    placement: PlacementCounts
    draining: bool
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache, since the start."""
    prefix_cache_hits: int = 0
    """Prefix-cache hits among prefix_cache_queries, tokens."""
    prefetch: Mapping[str, int] = field(default_factory=dict)
    """Counters of prefetching, as in `core_tables.COUNTERS`. Empty before the first step."""
    dynamic_update: Mapping[str, int] = field(default_factory=dict)
    """Steps with prompt tokens by outcome of the update, where --enable-dynamic-expert-update was given."""
    num_preemptions: int = 0
    """Preemptions since the start."""
    step_tokens: Mapping[int, int] = field(default_factory=dict)
    """Steps since the start by the number of tokens they computed."""
    speculation: SpeculationCounts | None = None
    """None: no drafter has run."""


class RequestProgress(NamedTuple):
    """Progress of one request."""

    request: GenerationRequest
    number: int
    """Order of arrival."""
    max_tokens: int
    is_running: bool
    """The sequence is running; otherwise it is waiting, possibly after a preemption."""
    num_computed: int
    """Leading tokens, prompt first, whose keys and values are in the cache."""
    num_generated: int
    num_cached: int = 0
    """Prefix-cache hits among the prompt tokens."""
    submitted_s: float = 0.0
    """Unix time."""


class StepParts(NamedTuple):
    """Wall time of a step by part, in microseconds. Python between the parts is the rest of `StepRecord.wall_us`.

    On a device that computes the dense part itself, `attention_us` is the time between two layers' experts (attention,
    router) and `head_us` is the time before the first and after the last experts.
    """

    schedule_us: Annotated[float, "taking in requests and choosing the step's tokens"] = 0.0
    batch_us: Annotated[float, "building the batch"] = 0.0
    embed_us: float = 0.0
    attention_us: float = 0.0
    router_us: float = 0.0
    dense_ffn_us: Annotated[float, "feed-forward layers without experts"] = 0.0
    experts_cpu_us: Annotated[float, "time beyond the GPU's, where the GPU computes too"] = 0.0
    experts_gpu_us: float = 0.0
    head_us: float = 0.0
    sampling_us: float = 0.0
    emit_us: Annotated[float, "detokenising and delivering tokens"] = 0.0
    telemetry_us: Annotated[float, "recording the previous step"] = 0.0


class EmulatedParts(NamedTuple):
    """Virtual-clock time of a step by part, in microseconds; the parts sum to `StepRecord.step_us`."""

    dense_us: Annotated[float, "virtual clock: embedding, attention and routers, on the GPU"]
    experts_gpu_us: Annotated[float, "virtual clock"]
    experts_cpu_us: Annotated[
        float, "virtual clock: time layers waited for the CPU beyond the GPU's computation"
    ]
    link_us: Annotated[float, "virtual clock: time layers waited for uploads"]
    head_us: Annotated[float, "virtual clock"]


class StepRecord(NamedTuple):
    """One engine iteration, for telemetry. Times are on the run's clock; `wall_us` is always wall time.

    A named tuple: one is made per step, and a frozen dataclass takes five times as long.
    """

    step: int
    started_s: Annotated[float, "Unix time"]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    step_us: Annotated[float, "run clock"]
    wall_us: Annotated[
        float,
        "wall time from taking in requests until the answers were delivered, plus recording the previous step",
    ]
    parts: StepParts = StepParts()
    emulated: EmulatedParts | None = None
    """On a virtual clock only."""
    involuntary_switches: Annotated[
        int | None,
        "times that the kernel took a core from the process, since the last step with a count; NULL: counted later",
    ] = None
    major_faults: Annotated[int | None, "pages of the process read from disk, since then"] = None
    cpu_us: Annotated[float | None, "CPU time of all threads of the process, since then"] = None
    begin_us: Annotated[
        float | None, "run clock since its start, when the step's tokens were chosen; NULL before version 5"
    ] = None
    num_drafted_tokens: Annotated[int, "of num_decode_tokens: drafted tokens, computed to be verified"] = 0
    num_accepted_tokens: Annotated[int, "drafted tokens that became part of an answer"] = 0
    predicted_us: Annotated[
        float, "run clock: a step with drafts as their price predicted it; 0: no drafts, or no price"
    ] = 0.0
    kv_use: Annotated[float | None, "share of the KV pages in use after it; NULL before version 9"] = None
    num_preemptions: Annotated[
        int | None, "sequences preempted since the step before; NULL before version 9"
    ] = None
    engine_cpu_us: Annotated[float | None, "CPU time of the engine's thread"] = None
    collection_us: Annotated[float | None, "garbage collections of Python, which stop its threads"] = None
    num_full_collections: Annotated[int | None, "collections of the oldest generation"] = None
    num_counted_steps: Annotated[
        int | None,
        "steps, this one last, that counts since the last one cover; NULL: counted with a later step",
    ] = None
    minor_faults: Annotated[
        int | None, "pages of the process mapped without reading, since the last count"
    ] = None
    voluntary_switches: Annotated[int | None, "times that the engine's thread waited, since then"] = None
    core_wait_us: Annotated[
        float | None, "time that the engine's thread was ready and had no core, since then; NULL: unknown"
    ] = None
    others_core_wait_us: Annotated[
        float | None, "the same of the other thread of the process that waited longest"
    ] = None
    others_cpu_us: Annotated[float | None, "CPU time of Python's other threads, since then"] = None
    num_pinned_threads: Annotated[
        int | None,
        "computing threads with fewer cores than at the engine's start; NULL: not read, the step was not long",
    ] = None
    num_misses: Annotated[int | None, "routed experts that were not resident; NULL: no slots"] = None
    num_fetched: Annotated[int | None, "of them: uploaded on demand"] = None
    upload_bytes: Annotated[int | None, "uploaded experts, for all reasons"] = None


@dataclass(frozen=True)
class ControlRecord:
    """A change to a running engine and the sizes in effect from then on."""

    at_s: Annotated[float, "Unix time"]
    kind: Annotated[Literal["resize", "sleep", "wake"], "resize, sleep or wake"]
    num_slots: Annotated[int, "from then on"]
    num_pages: Annotated[int, "of the KV cache, from then on"]


class TraceSizes(NamedTuple):
    """Model sizes from which `twofold lab` computes times. Bytes are as stored."""

    hidden: float
    intermediate: float
    """Intermediate size of one expert."""
    bits_per_weight: float
    """Bits per expert weight."""
    dense_bytes_per_layer: float
    """Attention, router, norms, shared experts, per MoE layer."""
    head_bytes: float
    """Final norm and output projection."""


@dataclass(frozen=True)
class EngineFailure:
    """State of an engine whose device failed, or whose files of weights were changed, while it served."""

    state: Literal["reloading", "replaced", "failed"]
    """reloading: the model is being loaded on the CPU; replaced: the CPU serves; failed: nothing can be computed."""
    reason: str
    code: str = "device_lost"
    """`UnusableEngineError.code` of the error."""


@dataclass(frozen=True)
class RunInfo:
    """One process lifetime: the row of table `run` that everything else refers to."""

    model: str
    architecture: str
    accelerator: Annotated[str, "none, cuda:0 or emulated:PROFILE"]
    accelerator_reason: str
    clock: Annotated[Clock, "wall or virtual"]
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
    host: Annotated[str, "name of the machine"] = ""
    replica: Annotated[str, "id of the replica in its fleet; empty without --ray"] = ""
    kind: Annotated[RunKind, "serving, or training: its steps are in table training_step"] = "serving"
    run_name: Annotated[str, "--run-name; empty without one"] = ""
    run_tags: Annotated[str, "--run-tag, with commas between several"] = ""
    machine_json: Annotated[str, "processor, memory, versions, figures of the cost model"] = "{}"
    output_changes: tuple[str, ...] = ()
    """Effects of the enabled settings that change outputs (expert deferral, cache-aware routing)."""
    trace_sizes: TraceSizes | None = None
    """The model's sizes, stored in a recorded trace."""
    context_limit_reason: str = ""
    """The limit that ends the context before the model's own does; empty: none."""
