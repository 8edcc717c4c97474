"""State of one request inside the engine: its validation and its growing answer.

`RequestState` joins a scheduled sequence with its sampler, its text and its times. Times are seconds of the run's clock
unless named `*_unix_s`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy.typing as npt

from twofold.api.errors import RequestError
from twofold.api.media import PromptMedia
from twofold.api.pooling import ModelPooling
from twofold.api.request_record import RequestRecord
from twofold.api.request_times import RequestTimes
from twofold.api.sampling_ranges import BIAS_RANGE, LOGPROBS_RANGE, SAMPLING_RANGES
from twofold.api.types import (
    Chunk,
    Clock,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from twofold.step.sampler import Sampler, needs_masks
from twofold.step.sequences import Sequence
from twofold.text.tokenizer.text_stream import Detokenizer, TextStream

MAX_ENTRIES: Final = 1024
"""Maximum tokens in each of stop_token_ids, logit_bias and (over all its sequences) bad_words."""
_MAX_TOKENS: Final = 2**31
MAX_RECORDED_TOKENS: Final = 4096
"""Answer tokens whose text telemetry keeps, where it keeps texts."""


def check_request(
    request: GenerationRequest,
    vocab_size: int,
    max_context: int,
    *,
    by_priority: bool = False,
    limit_reason: str = "",
) -> None:
    """Refuse a request that can never be served. Raises RequestError naming the parameter.

    limit_reason: what ends the context before the model's own does.
    """
    if request.priority != 0 and not by_priority:
        raise RequestError(
            f"priority is {request.priority}; this engine serves in order of arrival. Leave it out, or start it "
            "with --scheduling-policy priority",
            param="priority",
        )
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if request.pooling is not None:
        _check_pooled(request, vocab_size, max_context)
    elif len(prompt) >= max_context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the context holds {max_context} with the answer. Shorten the prompt"
            + (f" ({limit_reason})" if limit_reason else ""),
            param="prompt",
        )
    worst = max(prompt) if min(prompt) >= 0 else min(prompt)
    if not 0 <= worst < vocab_size:
        raise RequestError(f"token id {worst} is outside the vocabulary of {vocab_size}", param="prompt")
    if request.prediction:
        worst = max(request.prediction) if min(request.prediction) >= 0 else min(request.prediction)
        if not 0 <= worst < vocab_size:
            raise RequestError(
                f"prediction holds token {worst}; ids are from 0 to {vocab_size - 1}", param="prediction"
            )
    if request.media is not None:
        _check_media(request.media, len(prompt))
    check_sampling(request.sampling, vocab_size)


def check_pooling(request: GenerationRequest, model: ModelPooling) -> None:
    """Refuse an embedding of a model that gives none, and an answer of a model without a head."""
    if request.pooling is None:
        if not model.generates:
            raise RequestError(
                "this model has no head, so it generates nothing; use /v1/embeddings or /v1/rerank",
                param="model",
            )
    elif model.refusal and not request.pooling.tokens:
        raise RequestError(f"this model gives no embeddings: {model.refusal}", param="model")
    elif request.pooling.tokens and not (model.generates or model.num_labels):
        raise RequestError(
            "this model has no head, so it has no logits; leave out the classifier", param="model"
        )


def _check_media(media: PromptMedia, num_tokens: int) -> None:
    ends = [0, *(span.end for span in media.spans)]
    begins = [*(span.begin for span in media.spans), num_tokens]
    apart = all(end <= begin for end, begin in zip(ends, begins, strict=True))
    whole = all(0 <= s.first_row <= len(s.media.rows) - s.count and s.count > 0 for s in media.spans)
    if not (apart and whole):
        raise RequestError("the pictures' rows are not in order within the prompt", param="prompt")
    places = media.rotations
    if places is not None and not (
        places.shape[1:] == (num_tokens,) and places.min() >= 0 and places.max() < num_tokens
    ):
        raise RequestError(
            f"the rotary positions are not those of {num_tokens} tokens, from 0 to {num_tokens - 1}",
            param="prompt",
        )


def check_runs(runs: Iterable[tuple[int, int]], max_tokens: int) -> None:
    """Refuse pictures whose tokens attend to one another and do not fit into a step of a device, whose memory is for
    `max_tokens`. Raises RequestError.

    runs: (begin, end) of such tokens.
    """
    longest = max((end - begin for begin, end in runs), default=0)
    if longest > max_tokens:
        raise RequestError(
            f"pictures of {longest} tokens that attend to one another were given; a step on a GPU holds {max_tokens} "
            "(--max-num-batched-tokens). Send a smaller picture, or text between pictures",
            param="prompt",
        )


def _of_pictures(media: PromptMedia | None, *, shown: bool) -> dict[str, Any]:
    """The columns of a request about its pictures. shown: with small views of them."""
    if media is None:
        return {}
    pictures = media.pictures
    return {
        "num_pictures": len(pictures),
        "image_tokens": media.num_tokens,
        "picture_pixels": sum(picture.num_pixels for picture in pictures),
        "pictures_json": json.dumps([picture.thumbnail for picture in pictures]) if shown else None,
    }


def _check_pooled(request: GenerationRequest, vocab_size: int, max_context: int) -> None:
    if len(request.prompt_token_ids) > max_context:
        raise RequestError(
            f"the input has {len(request.prompt_token_ids)} tokens; the context holds {max_context}. Shorten it",
            param="prompt",
        )
    assert request.pooling is not None
    _check_tokens("pooling", request.pooling.tokens, vocab_size)
    if request.sampling.max_tokens != 0 or request.return_routed_experts:
        raise RequestError("a pooled prompt has no answer; leave out max_tokens", param="pooling")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Check sampling settings. Raises RequestError naming the parameter, its value and its range."""
    ranges = {**SAMPLING_RANGES, "logprobs": LOGPROBS_RANGE, "prompt_logprobs": LOGPROBS_RANGE}
    for name, allowed in ranges.items():
        value = getattr(sampling, name)
        if value is not None and not allowed.holds(value):
            raise RequestError(f"{name} is {value}; it must be from {allowed}", param=name)
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; it must be 0 or more", param="max_tokens")
    most = _MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    if not 0 <= sampling.min_tokens <= most:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; it must be from 0 to max_tokens, {most}",
            param="min_tokens",
        )
    _check_tokens("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], vocab_size)
    if len({token for token, _ in sampling.logit_bias}) != len(sampling.logit_bias):
        raise RequestError("logit_bias names a token twice; give each once", param="logit_bias")
    for token, bias in sampling.logit_bias:
        if not BIAS_RANGE.holds(bias):
            raise RequestError(
                f"logit_bias of token {token} is {bias}; it must be from {BIAS_RANGE}", param="logit_bias"
            )
    if not all(sampling.bad_words):
        raise RequestError(
            "bad_words holds an empty sequence; give each at least one token", param="bad_words"
        )
    _check_tokens("bad_words", [token for word in sampling.bad_words for token in word], vocab_size)
    if sampling.seed is not None and not 0 <= sampling.seed < 2**64:
        raise RequestError(f"seed is {sampling.seed}; it must be from 0 to 2^64-1", param="seed")


def _check_tokens(name: str, tokens: Seq[int], vocab_size: int) -> None:
    if len(tokens) > MAX_ENTRIES:
        raise RequestError(f"{name} has {len(tokens)} tokens; at most {MAX_ENTRIES} are taken", param=name)
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name} names token {token}; ids are from 0 to {vocab_size - 1}", param=name)


def max_answer_tokens(request: GenerationRequest, max_context: int) -> int:
    """Most tokens the answer may have: the requested number, limited by the remaining context."""
    room = max_context - len(request.prompt_token_ids)
    wanted = request.sampling.max_tokens
    return room if wanted is None else min(wanted, room)


class RequestState:
    """The growing answer to one request. Owned by the engine's thread after submission.

    Uses __slots__ because every token touches it after the layers have evicted it from the CPU caches.
    """

    __slots__ = (
        "_ended", "_finish_reason", "_finished", "_finished_unix_s", "_first_token", "_first_token_unix_s",
        "_last_token_ids", "_last_token_wall_s", "_logprobs", "_longest_gap_s", "_num_sent",
        "_pieces", "_prompt_logprobs_pending", "_scheduled", "_submitted", "_submitted_unix_s", "_text", "_times",
        "_wall", "_wall_end", "sampler", "sequence",
    )  # fmt: skip

    def __init__(
        self,
        sequence: Sequence,
        detokenizer: Detokenizer,
        default_seed: int | None,
        now: float,
        eos_token_ids: Collection[int] = (),
        *,
        keep_text: bool = False,
    ) -> None:
        request = sequence.request
        sampling = request.sampling
        self.sequence = sequence
        matcher = None if request.constraint is None else request.constraint.start(needs_masks(sampling))
        self.sampler = Sampler(
            sampling, request.prompt_token_ids, default_seed, eos_token_ids, matcher=matcher
        )
        self._last_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._last_token_ids |= frozenset(eos_token_ids)
        self._ended = False
        self._pieces: list[str] | None = [] if keep_text else None
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs_pending = sampling.prompt_logprobs is not None
        self._text = TextStream(detokenizer, request.sampling.stop)
        self._num_sent = sequence.num_prompt_tokens
        self._submitted = now
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._finished: float | None = None
        self._finish_reason: FinishReason | None = None
        self._times = request.times or RequestTimes.begin()
        # submitted, scheduled, first token
        self._wall = [self._times.submitted]
        self._wall_end: float | None = None
        self._last_token_wall_s = 0.0
        self._longest_gap_s: float | None = None
        self._submitted_unix_s = self._times.unix_s(time.perf_counter())
        self._first_token_unix_s: float | None = None
        self._finished_unix_s: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether the answer ends: a stop string, a token that ends the answer, or a complete constraint."""
        matcher = self.sampler.matcher
        return self._ended or self._text.stopped or (matcher is not None and matcher.ended)

    @property
    def failure(self) -> str | None:
        """Why the answer cannot continue as the request demands."""
        matcher = self.sampler.matcher
        return None if matcher is None else matcher.error

    @property
    def is_empty(self) -> bool:
        """Whether neither tokens nor prompt log probabilities nor a pooled vector are requested."""
        request = self.sequence.request
        return (
            self.sequence.max_tokens == 0
            and request.sampling.prompt_logprobs is None
            and request.pooling is None
        )

    def scheduled(self, now: float) -> None:
        """Record that the request takes part in a step. The first call ends its time in the queue."""
        if self._scheduled is None:
            self._scheduled = now
            self._wall.append(time.perf_counter())

    def push(self, token: int, now: float) -> str:
        """Append a token and return text that may be shown. Tokens that end the answer have no text."""
        self.sequence.token_ids.append(token)
        if self.sampler.logprob is not None:
            self._logprobs.append(self.sampler.logprob)
        wall_s = time.perf_counter()
        if self._first_token is None:
            self._first_token, self._first_token_unix_s = now, self._times.unix_s(wall_s)
            self._wall.append(wall_s)
        elif wall_s - self._last_token_wall_s > (self._longest_gap_s or 0.0):
            self._longest_gap_s = wall_s - self._last_token_wall_s
        self._last_token_wall_s = wall_s
        if token in self._last_token_ids:
            self._ended = True
            return ""
        text = self._text.push(token)
        if self._pieces is not None and len(self._pieces) < MAX_RECORDED_TOKENS:
            self._pieces.append(text)
        return text

    def flush(self) -> str:
        """Return the text that was held back until now."""
        return self._text.flush()

    def chunk(
        self,
        text: str,
        reason: FinishReason | None = None,
        usage: Usage | None = None,
        error: str | None = None,
        routed_experts: npt.NDArray[Any] | None = None,
    ) -> Chunk:
        """The next piece of the answer: `text` and every token not yet sent in a chunk."""
        token_ids = self.sequence.token_ids
        sent, self._num_sent = self._num_sent, len(token_ids)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs:
            logprobs, self._logprobs = tuple(self._logprobs), []
        return Chunk(
            text=text,
            token_ids=tuple(token_ids[sent:]),
            finish_reason=reason,
            usage=usage,
            error=error,
            stopped_by=self._text.stopped_by if reason is not None else None,
            routed_experts=routed_experts,
            logprobs=logprobs,
            prompt_logprobs=self._take_prompt_logprobs() if self._prompt_logprobs_pending else None,
            pooled=self.sequence.pooler.vector() if self.sequence.pooler and reason == "stop" else None,
        )

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return prompt log probabilities once, when the whole prompt is computed. A request may end before that."""
        found = self.sequence.prompt_logprobs
        if len(found) != self.sequence.num_prompt_tokens - 1:
            return None
        self._prompt_logprobs_pending = False
        return (None, *found)

    def finish(self, reason: FinishReason, now: float, clock: Clock) -> Usage:
        self._wall_end = time.perf_counter()
        self._finished, self._finish_reason = now, reason
        self._finished_unix_s = self._times.unix_s(self._wall_end)
        queue_s, prefill_s, decode_s = self._durations()
        predicted = self.sequence.request.prediction
        return Usage(
            prompt_tokens=self.sequence.num_prompt_tokens,
            completion_tokens=self.sequence.num_generated,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            clock=clock,
            cached_tokens=self.sequence.num_cached,
            image_tokens=0 if (media := self.sequence.request.media) is None else media.num_tokens,
            wall_s=self._wall_durations(),
            max_tokens=self.sequence.max_tokens,
            accepted_prediction_tokens=(accepted := self.sequence.num_accepted if predicted else 0),
            rejected_prediction_tokens=max(len(predicted) - accepted, 0),
        )

    def record(self) -> RequestRecord:
        """The request as telemetry stores it, in its present state."""
        request = self.sequence.request
        queue_s, prefill_s, decode_s = self._durations()
        queue_wall_s, prefill_wall_s, decode_wall_s = self._wall_durations()
        return RequestRecord(
            number=self.sequence.number,
            request_id=request.request_id,
            endpoint=request.endpoint,
            submitted_s=self._submitted_unix_s,
            first_token_s=self._first_token_unix_s,
            finished_s=self._finished_unix_s,
            prompt_tokens=self.sequence.num_prompt_tokens,
            completion_tokens=self.sequence.num_generated,
            finish_reason=self._finish_reason,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            longest_gap_s=self._longest_gap_s,
            sampling=request.sampling,
            cached_tokens=self.sequence.num_cached,
            queue_wall_s=queue_wall_s,
            prefill_wall_s=prefill_wall_s,
            decode_wall_s=decode_wall_s,
            **self._before_submission(),
            **_of_pictures(request.media, shown=self._pieces is not None and self._finish_reason is not None),
            answer_json=json.dumps(self._pieces) if self._pieces and self._finish_reason else None,
            accepted_tokens=self.sequence.num_accepted,
            rejected_tokens=self.sequence.num_rejected,
            trace_id=request.origin.trace_id,
            routed_by=request.origin.routed_by,
            adapter="" if request.adapter is None else request.adapter.name,
        )

    def _before_submission(self) -> dict[str, Any]:
        """The columns of the time before the engine had the request."""
        times = self.sequence.request.times
        if times is None:
            return {"received_s": self._submitted_unix_s}
        parts = {f"{part}_s": seconds for part, seconds in times.parts.items()}
        return {"received_s": times.received_s, "first_sent_s": times.first_sent_s, **parts}

    def _wall_durations(self) -> tuple[float, float, float]:
        """As `_durations`, in wall time. The phase in which the request ended lasts until the end."""
        ends = [] if self._wall_end is None else [self._wall_end]
        phases = [end - begin for begin, end in itertools.pairwise([*self._wall, *ends])]
        queue_s, prefill_s, decode_s = (*phases, 0.0, 0.0, 0.0)[:3]
        return queue_s, prefill_s, decode_s

    def _durations(self) -> tuple[float, float, float]:
        """(queue, prefill, decode); a phase that has not begun lasted 0."""
        if self._scheduled is None:
            return 0.0, 0.0, 0.0
        queue_s = self._scheduled - self._submitted
        if self._first_token is None:
            # A pooled prompt has no token; it is prefilled until its end.
            is_pooled = self.sequence.pooler is not None and self._finished is not None
            return queue_s, (self._finished or 0.0) - self._scheduled if is_pooled else 0.0, 0.0
        end = self._first_token if self._finished is None else self._finished
        return queue_s, self._first_token - self._scheduled, end - self._first_token
