"""Requests from their submission to their last chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from twofold.api.config import EngineConfig
from twofold.api.errors import TwofoldError
from twofold.api.types import Chunk, FinishReason, GenerationRequest
from twofold.engine.inbox import Inbox
from twofold.engine.kv_cache import PagePool
from twofold.engine.loading import EngineParts
from twofold.engine.recording import Recorder
from twofold.engine.requests import RequestState
from twofold.engine.scheduler import Scheduler
from twofold.engine.step_clock import RunClock
from twofold.step.draft_price import MoeTimes
from twofold.step.runner import Verifier
from twofold.step.sequences import ScheduledSequence, Sequence
from twofold.step.speculation import Speculator

_log = logging.getLogger(__name__)


class Speculation(NamedTuple):
    """What proposes drafts, and what picks the tokens after accepted ones."""

    speculator: Speculator
    verifier: Verifier

    @classmethod
    def of(cls, config: EngineConfig, parts: EngineParts, pool: PagePool) -> Speculation | None:
        """Speculation of an engine; None where steps with drafts cannot be computed."""
        loaded = parts.loaded
        if loaded.verifier is None:
            return None
        pool.own_record_first = loaded.own_record_first
        times = MoeTimes(loaded.runner.moe, loaded.num_moe_layers)
        return cls(Speculator(config.speculation, pool, times, parts.drafter), loaded.verifier)


@dataclass(slots=True)
class _Verification:
    """A sequence's newest picked token and how many of its drafts were accepted before."""

    item: ScheduledSequence
    state: RequestState
    row: int
    """Its first row of logits."""
    token: int
    num_accepted: int = 0
    has_ended: bool = False
    text: str = ""
    """Text of the tokens appended so far, delivered in one chunk."""

    def take_row(self) -> None:
        """Count the token before the picked one as computed; the record after it becomes the sequence's."""
        sequence = self.item.sequence
        sequence.num_computed += 1
        sequence.num_accepted += self.num_accepted > 0
        if self.item.records:
            sequence.record = self.item.records[self.num_accepted]

    @property
    def continues(self) -> bool:
        """Whether the picked token is the next draft, so that the one after it can be picked."""
        drafts, at = self.item.drafts, self.num_accepted
        return not self.has_ended and at < len(drafts) and self.token == drafts[at]


class Delivery:
    """Calls the requests' callbacks. Exceptions in them are logged and affect no other request."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """cancel: called with the id of a request whose `on_chunk` raised before its last chunk."""
        self._cancel = cancel
        self._to_wake: set[Callable[[], None]] = set()

    def deliver(self, request: GenerationRequest, chunk: Chunk) -> None:
        try:
            request.on_chunk(chunk)
        except Exception:
            _log.exception("on_chunk of request %s failed", request.request_id)
            if chunk.finish_reason is None:
                self._cancel(request.request_id)
        if request.after_step is not None:
            self._to_wake.add(request.after_step)

    def wake(self) -> None:
        """Call each `after_step` once, after the step's last chunk."""
        while self._to_wake:
            wake = self._to_wake.pop()
            try:
                wake()
            except Exception:
                _log.exception("after_step of a request failed")


class ActiveRequests:
    """Takes requests from the inbox, appends sampled tokens, delivers chunks and finishes requests. Owned by the
    engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        recorder: Recorder,
        delivery: Delivery,
        clock: RunClock,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
        self._scheduler, self._inbox = scheduler, inbox
        self._recorder, self._delivery, self._clock = recorder, delivery, clock
        self._requests: dict[int, RequestState] = {}

    def of(self, sequence: Sequence) -> RequestState:
        return self._requests[sequence.number]

    def all(self) -> list[RequestState]:
        return list(self._requests.values())

    def update_from_inbox(self, max_context: int) -> None:
        """Accept new requests and finish cancelled ones. max_context: prompt plus answer that one request may have."""
        empty: list[RequestState] = []
        too_long: list[RequestState] = []

        def receive(state: RequestState) -> None:
            sequence = state.sequence
            self._requests[sequence.number] = state
            if state.is_empty:
                empty.append(state)
                return
            if sequence.num_prompt_tokens + sequence.max_tokens > max_context:
                too_long.append(state)  # the KV cache was made smaller after the request was accepted
                return
            if sequence.request.return_routed_experts:
                self._recorder.watch_routing(sequence.number)
            self._scheduler.add(sequence)

        self._inbox.take(receive)
        for state in empty:
            self._finish(state, "length")
        for state in too_long:
            self._finish(state, "error", error=f"the context was made smaller, to {max_context} tokens")
        if cancelled := self._inbox.take_cancelled():
            for state in self.all():
                if state.sequence.request.request_id in cancelled:
                    self._finish(state, "cancelled")

    def append_picked(
        self,
        scheduled: Seq[ScheduledSequence],
        requests: Seq[RequestState],
        picked: Seq[int],
        now_s: float,
    ) -> None:
        """Append a step's picked tokens; where they equal drafts, pick and append the tokens after them."""
        tokens = iter(picked)
        drafted: list[_Verification] = []
        row = 0
        for item, state in zip(scheduled, requests, strict=True):
            if item.drafts:
                drafted.append(_Verification(item, state, row, next(tokens)))
                row += item.num_tokens
                continue
            item.sequence.num_computed += item.num_tokens
            if item.samples:
                self._deliver(state, self._append(state, next(tokens), now_s))
                row += 1
            elif item.sequence.pooler is not None and item.sequence.num_uncomputed == 0:
                self._finish(state, "stop")
        if drafted:
            self._verify(drafted, now_s)

    def _verify(self, drafted: Seq[_Verification], now_s: float) -> None:
        """Append tokens as single steps would: each answer goes on while it picks its drafts and has not ended."""
        assert self._speculation is not None, "drafts without a speculator"
        speculator, verifier = self._speculation
        ongoing = list(drafted)
        while ongoing:
            for each in ongoing:
                each.take_row()
                text = self._append(each.state, each.token, now_s, each.text)
                each.has_ended, each.text = text is None, text or ""
            ongoing = [each for each in ongoing if each.continues]
            if not ongoing:
                break
            for each in ongoing:
                each.num_accepted += 1
            try:
                rows = [each.row + each.num_accepted for each in ongoing]
                picked = verifier.pick_verified(rows, [each.state.sampler for each in ongoing])
            except (TwofoldError, ValueError, RuntimeError, MemoryError) as error:
                for each in ongoing:
                    each.num_accepted, each.has_ended = each.num_accepted - 1, True
                    self._finish(each.state, "error", each.text, error=_message(error))
                    each.text = ""
                break
            for each, token in zip(ongoing, picked, strict=True):
                each.token = token
        for each in drafted:
            self._deliver(each.state, each.text)
            speculator.verified(each.item, each.num_accepted, has_ended=each.has_ended)

    def _append(self, state: RequestState, token: int, now_s: float, before: str = "") -> str | None:
        """Append a sampled token and return the text to deliver: `before`, and the token's. None: the request has
        finished."""
        sequence = state.sequence
        if sequence.max_tokens == 0:  # only prompt log probabilities were requested
            self._finish(state, "length")
        elif state.failure is not None:
            # The client reads it as it reads an answer cut off by its limit: what there is may be incomplete.
            _log.warning("request %s ended early: %s", sequence.request.request_id, state.failure)
            self._finish(state, "length", before)
        else:
            text = before + state.push(token, now_s)
            if sequence.num_generated == 1:
                self._recorder.request(state)
            is_stopped = state.stopped
            if not is_stopped and sequence.num_generated < sequence.max_tokens:
                return text
            self._finish(state, "stop" if is_stopped else "length", text)
        return None

    def _deliver(self, state: RequestState, text: str | None) -> None:
        if text:
            self._delivery.deliver(state.sequence.request, state.chunk(text))

    def fail(self, requests: Seq[RequestState], error: Exception) -> None:
        """Finish these requests with an error."""
        for state in requests:
            self._finish(state, "error", error=_message(error))

    def _finish(
        self, state: RequestState, reason: FinishReason, text: str = "", error: str | None = None
    ) -> None:
        sequence = state.sequence
        if self._speculation is not None and error is None and sequence.pages:
            self._speculation.speculator.ending(sequence)
        self._scheduler.finish(sequence, keep=error is None)
        if self._speculation is not None:
            self._speculation.speculator.finished(sequence)
        del self._requests[sequence.number]
        usage = state.finish(reason, self._clock.now_s(), "virtual" if self._clock.is_virtual else "wall")
        self._recorder.request(state)
        routing = self._recorder.take_routing(sequence.number)
        chunk = state.chunk(text + state.flush(), reason, usage=usage, error=error, routed_experts=routing)
        self._delivery.deliver(sequence.request, chunk)
        self._inbox.finished(sequence.request.request_id)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
