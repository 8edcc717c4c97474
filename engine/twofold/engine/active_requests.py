"""Requests from their submission to their last chunk."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from twofold.api.types import FinishReason
from twofold.engine.delivery import Delivery
from twofold.engine.inbox import Inbox
from twofold.engine.recording import Recorder
from twofold.engine.requests import RequestState
from twofold.engine.scheduler import Scheduler
from twofold.engine.step_clock import RunClock
from twofold.step.sequences import Sequence


class ActiveRequests:
    """Takes requests from the inbox, appends sampled tokens, delivers chunks and finishes requests. Owned by the
    engine's thread."""

    def __init__(
        self, scheduler: Scheduler, inbox: Inbox, recorder: Recorder, delivery: Delivery, clock: RunClock
    ) -> None:
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

    def append_token(self, state: RequestState, token: int, now_s: float) -> None:
        """Append a sampled token, deliver its text, and finish the request if the token was its last."""
        sequence = state.sequence
        if sequence.max_tokens == 0:  # only prompt log probabilities were requested
            self._finish(state, "length")
            return
        if state.failure is not None:
            self._finish(state, "error", error=state.failure)
            return
        num_generated = sequence.num_generated + 1
        text = state.push(token, now_s)
        if num_generated == 1:
            self._recorder.request(state)
        if state.stopped:
            self._finish(state, "stop", text)
        elif num_generated >= sequence.max_tokens:
            self._finish(state, "length", text)
        elif text:
            self._delivery.deliver(sequence.request, state.chunk(text))

    def fail(self, requests: Seq[RequestState], error: Exception) -> None:
        """Finish these requests with an error."""
        for state in requests:
            self._finish(state, "error", error=f"{type(error).__name__}: {error}")

    def _finish(
        self, state: RequestState, reason: FinishReason, text: str = "", error: str | None = None
    ) -> None:
        sequence = state.sequence
        self._scheduler.finish(sequence, keep=error is None)
        del self._requests[sequence.number]
        usage = state.finish(reason, self._clock.now_s(), "virtual" if self._clock.is_virtual else "wall")
        self._recorder.request(state)
        routing = self._recorder.take_routing(sequence.number)
        chunk = state.chunk(text + state.flush(), reason, usage=usage, error=error, routed_experts=routing)
        self._delivery.deliver(sequence.request, chunk)
        self._inbox.finished(sequence.request.request_id)
