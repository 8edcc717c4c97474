"""The engine: requests in, tokens out. `Engine.step` is schedule, forward, sample, emit.

Callers' threads (`submit`, `cancel`, `stats`) and the engine's own loop (`start`) meet only in the `Inbox`. Independent
of HTTP, terminals and databases; events are pushed to a telemetry sink.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

from twofold.api.config import EngineConfig
from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.errors import CapacityError, TwofoldError
from twofold.api.types import (
    Chunk,
    EngineStats,
    FinishReason,
    GenerationRequest,
    MappedWeights,
    RequestProgress,
    SamplingParams,
    Usage,
)
from twofold.engine.constraints import GrammarCompiler
from twofold.engine.control import LiveControl
from twofold.engine.delivery import Delivery
from twofold.engine.expert_recording import ExpertRecording
from twofold.engine.inbox import Inbox
from twofold.engine.loading import EngineParts, load_parts
from twofold.engine.prefill_budget import PrefillBudget
from twofold.engine.recording import Recorder
from twofold.engine.requests import RequestState, check_request, max_answer_tokens
from twofold.engine.scheduler import Scheduler
from twofold.engine.step_clock import StepClock
from twofold.engine.waiting import Waiter
from twofold.models import ProgressFn
from twofold.step.sampler import Sampler
from twofold.step.sequences import ScheduledSequence, Sequence
from twofold.telemetry.sink import TelemetrySink

_log = logging.getLogger(__name__)


class Engine:
    """Loads a model and serves requests from it. Create one with `Engine.load`."""

    def __init__(
        self, config: EngineConfig, parts: EngineParts, telemetry: TelemetrySink | None = None
    ) -> None:
        tokenizer, pool, info = parts.tokenizer, parts.kv_pages, parts.info
        self.config = config
        self.tokenizer = tokenizer
        self.info = info
        self._runner = runner = parts.loaded.runner
        self._moe = runner.moe
        self.vocab_size = runner.vocab_size
        self._eos_token_ids = tokenizer.eos_token_ids
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size)
        self._pool = pool
        self._prefill_budget = PrefillBudget(
            config.max_num_batched_tokens, None if config.max_itl_ms is None else config.max_itl_ms * 1e-3
        )
        self._scheduler = Scheduler(
            pool,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            None if config.backend == "single" else self._prefill_budget,
            by_priority=config.scheduling_policy == "priority",
        )
        self._recorder = Recorder(telemetry, runner.moe, info)
        self._step_clock = StepClock(runner, enabled=telemetry is not None)
        self._answers: dict[int, RequestState] = {}
        self._scheduled: Seq[ScheduledSequence] = ()
        self._step_answers: list[RequestState] = []
        self._step_samplers: list[Sampler] = []
        self._num_step_tokens = 0
        self._delivery = Delivery(self.cancel)
        self._numbers = itertools.count()
        self._num_steps = 0
        self._cache_state = parts.cache_state
        self._residency = parts.residency
        self._started = time.perf_counter()
        self._virtual_s = 0.0 if info.clock == "virtual" else None
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None
        self.control = LiveControl(
            config, parts.loaded, pool, self._scheduler, self._inbox, lambda: self._thread is not None,
            self._finish_background_work, self._changed,
        )  # fmt: skip
        self.recording = ExpertRecording(config, parts.recorded, runner.moe, self.control.between_steps)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        telemetry: TelemetrySink | None = None,
        progress: ProgressFn | None = None,
    ) -> Engine:
        """Load the model of `config` and get ready to serve.

        Raises:
            ConfigError: a setting cannot be met.
            ModelLoadError: the model cannot be used; the message names the file and the remedy.
            CapacityError, KernelError: the device has no room, or failed.
        """
        return cls(config, load_parts(config, progress), telemetry)

    # ---- callers' threads -------------------------------------------------------------------------------------------

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile a constraint for use in requests; the result is cached. Blocks. Thread-safe.

        Raises:
            RequestError: the grammar is too large, invalid, unsupported, or matches nothing.
            CapacityError: too many grammars are waiting to be compiled.
        """
        return self._grammars.compile(constraint)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its chunks are delivered on the engine's thread. Thread-safe.

        Raises:
            RequestError: the request can never be served as it is.
            CapacityError: too many requests are waiting, or the engine is draining.
        """
        by_priority = self.config.scheduling_policy == "priority"
        check_request(request, self.vocab_size, self.max_context, by_priority=by_priority)
        max_tokens = max_answer_tokens(request, self.max_context)

        def begin() -> RequestState:
            sequence = Sequence(next(self._numbers), request, list(request.prompt_token_ids), max_tokens)
            answer = RequestState(
                sequence,
                self.tokenizer.detokenizer(shown=request.shown_tokens),
                self.config.seed,
                self._now_s(),
                self._eos_token_ids,
            )
            self._recorder.request(answer)
            return answer

        self._inbox.put(request.request_id, self.check_room, begin)

    def check_room(self) -> None:
        """Raise CapacityError if any request would be refused now. Thread-safe."""
        if self.control.asleep:
            raise CapacityError(
                "the server was sent to sleep and takes no requests until it is woken", asleep=True
            )
        if self._num_waiting >= self.config.max_waiting + self._num_free_places:
            raise CapacityError(
                f"{self.config.max_num_seqs} requests run and {self.config.max_waiting} wait already; try later"
            )

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its last chunk has finish reason "cancelled". Unknown ids are ignored. Thread-safe."""
        self._inbox.cancel(request_id)

    def start(self) -> None:
        """Serve on the engine's own thread until `close`."""
        self._thread = threading.Thread(target=self._serve, name="twofold-engine", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones. True if all finished in time."""
        return self._inbox.drain(0.0 if self.control.asleep else timeout_s)

    def close(self) -> None:
        """Cancel running requests, end the thread, flush telemetry events. Safe to call twice."""
        self._inbox.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._residency is not None:
            self._residency.close()
        self._inbox.carry_out_orders()
        self._take_inbox()
        self._drop_cancelled()
        self._delivery.wake()
        self._grammars.close()
        self._recorder.drain()
        self.recording.close()
        self._pool.close()
        if self._cache_state is not None:
            path, self._cache_state = self._cache_state, None
            self._moe.save_cache(path)

    def generate(
        self,
        prompt_token_ids: Seq[int],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        *,
        request_id: str = "generate",
        endpoint: str = "generate",
        constraint: Constraint | None = None,
    ) -> Usage:
        """Answer one prompt and return when done. Without `start`, the calling thread computes.

        Raises:
            RequestError, CapacityError: as `submit`. KernelError: the native code failed.
            KeyboardInterrupt: re-raised after the request was cancelled.
        """
        waiter = Waiter(on_chunk)
        prompt = tuple(prompt_token_ids)
        compiled = None if constraint is None else self.compile(constraint)
        self.submit(
            GenerationRequest(
                prompt, sampling, waiter.receive, request_id, endpoint=endpoint, constraint=compiled
            )
        )
        waiter.wait(None if self._thread is not None else self.step, lambda: self.cancel(request_id))
        self._finish_background_work()
        return waiter.usage()

    @property
    def mapped_weights(self) -> MappedWeights | None:
        """How much of a packed model's weights is in memory; None for any other model."""
        return None if self._residency is None else self._residency.weights

    @property
    def sampling_s(self) -> float:
        """Time spent sampling since the start."""
        return self._runner.sampling_s

    @property
    def caches_prefixes(self) -> bool:
        return self.config.enable_prefix_caching

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of running requests."""
        return self.config.max_num_seqs

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer of one request, in tokens."""
        return self.control.split.max_context

    def live_requests(self) -> list[RequestProgress]:
        """Running requests, then waiting ones, as seen from another thread; each is listed once."""
        return self.control.requests()

    def stats(self) -> EngineStats:
        with self._inbox.changed:
            return EngineStats(
                num_running=len(self._scheduler.running),
                num_waiting=self._num_waiting,
                num_free_pages=self._pool.num_free,
                num_pages=self._pool.num_pages,
                num_free_records=self._pool.num_free_records,
                num_records=self._pool.num_records,
                num_steps=self._num_steps,
                decode_tokens_per_s=self._recorder.decode_tokens_per_s,
                clock=self.info.clock,
                placement=self._recorder.placement,
                draining=self._inbox.draining,
                prefix_cache_queries=self._pool.num_queries,
                prefix_cache_hits=self._pool.num_hits,
                prefetch=self._recorder.prefetch,
                dynamic_update=self._moe.dynamic_update.counts,
                num_preemptions=self._scheduler.num_preemptions,
                step_tokens=dict(self._recorder.step_tokens),
            )

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration over the batch. False if there was nothing to do."""
        self._step_clock.begin()
        self._inbox.carry_out_orders()
        self._take_inbox()
        self._drop_cancelled()
        scheduled = () if self.control.asleep else self._scheduler.schedule()
        if not scheduled:
            self._delivery.wake()
            self._step_clock.idle()
            # While prefix-cache files are being read, check for new requests every few milliseconds.
            return self._scheduler.has_work and self._pool.wait_for_files(0.005)
        self._step_clock.scheduled()
        started_s, clock = time.time(), self._tick()
        if scheduled is not self._scheduled:
            self._take_up(scheduled, clock)
        answers = self._step_answers
        num_decoding = self._scheduler.num_decoding
        num_prefill = self._num_step_tokens - num_decoding
        try:
            picked = iter(self._runner.forward(self._num_steps, scheduled, self._step_samplers))
        except (TwofoldError, ValueError, RuntimeError, MemoryError) as error:
            _log.exception("step %d failed; its requests are given up", self._num_steps)
            self._fail(answers, error)
            self._delivery.wake()
            return True
        self._step_clock.computed()
        now = self._tick()
        for (sequence, num_tokens, samples), answer in zip(scheduled, answers, strict=True):
            sequence.num_computed += num_tokens
            if samples:
                self._emit(answer, next(picked), now)
        self._delivery.wake()
        wall_s = self._step_clock.end()
        clock_s = wall_s if self._virtual_s is None else now - clock
        self._prefill_budget.observe(num_prefill, num_decoding, clock_s)
        if num_prefill:
            self._moe.prompt_step_done()
        self._recorder.step(
            self._num_steps,
            scheduled,
            self._step_clock,
            started_s=started_s,
            wall_s=wall_s,
            clock_s=clock_s,
            num_running=len(self._scheduler.running),
            num_waiting=self._num_waiting,
        )
        self.recording.after_step(self._num_steps)
        self._step_clock.recorded()
        self._num_steps += 1
        return True

    def _take_up(self, scheduled: Seq[ScheduledSequence], clock: float) -> None:
        """Set up per-step state of the scheduled sequences; it stays valid while the scheduler returns the same
        list."""
        self._scheduled = scheduled
        self._step_answers = [self._answers[item.sequence.number] for item in scheduled]
        self._step_samplers = [
            self._answers[item.sequence.number].sampler for item in scheduled if item.samples
        ]
        self._num_step_tokens = sum(item.num_tokens for item in scheduled)
        for answer in self._step_answers:
            answer.scheduled(clock)

    def _serve(self) -> None:
        self._runner.pool.bind_caller()  # this thread is the pool's first
        while True:
            try:
                if self.step():
                    continue
                self._finish_background_work()
            except Exception as error:  # an internal bug: fail all requests so that no caller waits for ever
                _log.exception("the engine's loop failed; all its requests are given up")
                self._fail(list(self._answers.values()), error)
                self._delivery.wake()
            if not self._inbox.wait_for_work():
                return

    def _take_inbox(self) -> None:
        nothing_to_do: list[RequestState] = []
        too_long: list[RequestState] = []

        def receive(answer: RequestState) -> None:
            self._answers[answer.sequence.number] = answer
            if answer.is_empty:
                nothing_to_do.append(answer)
                return
            if answer.sequence.num_prompt_tokens + answer.sequence.max_tokens > self.max_context:
                too_long.append(answer)  # the KV cache was made smaller after the request was accepted
                return
            if answer.sequence.request.return_routed_experts:
                self._recorder.watch_routing(answer.sequence.number)
            self._scheduler.add(answer.sequence)

        self._inbox.take(receive)
        for answer in nothing_to_do:
            self._finish(answer, "length")
        for answer in too_long:
            self._finish(answer, "error", error=f"the context was made smaller, to {self.max_context} tokens")

    def _drop_cancelled(self) -> None:
        cancelled = self._inbox.take_cancelled()
        if not cancelled:
            return
        for answer in list(self._answers.values()):
            if answer.sequence.request.request_id in cancelled:
                self._finish(answer, "cancelled")

    def _emit(self, answer: RequestState, token: int, now: float) -> None:
        """Append a sampled token to its answer, deliver its text, and finish the answer if it was the last."""
        sequence = answer.sequence
        if sequence.max_tokens == 0:  # only prompt log probabilities were requested
            self._finish(answer, "length")
            return
        if answer.failure is not None:
            self._finish(answer, "error", error=answer.failure)
            return
        num_generated = sequence.num_generated + 1
        text = answer.push(token, now)
        if num_generated == 1:
            self._recorder.request(answer)
        if answer.stopped:
            self._finish(answer, "stop", text)
        elif num_generated >= sequence.max_tokens:
            self._finish(answer, "length", text)
        elif text:
            self._delivery.hand_out(answer.sequence.request, answer.chunk(text))

    def _finish(
        self, answer: RequestState, reason: FinishReason, text: str = "", error: str | None = None
    ) -> None:
        self._scheduler.finish(answer.sequence, keep=error is None)
        del self._answers[answer.sequence.number]
        usage = answer.finish(reason, self._now_s(), self.info.clock)
        self._recorder.request(answer)
        routing = self._recorder.take_routing(answer.sequence.number)
        chunk = answer.chunk(text + answer.flush(), reason, usage, error, routing)
        self._delivery.hand_out(answer.sequence.request, chunk)
        self._inbox.finished(answer.sequence.request.request_id)

    def _fail(self, answers: Seq[RequestState], error: Exception) -> None:
        for answer in answers:
            self._finish(answer, "error", error=f"{type(error).__name__}: {error}")
        self._num_steps += 1

    def _changed(self, what: Literal["resize", "sleep", "wake"]) -> None:
        """Record that memory was split differently or freed."""
        self._recorder.control(what, self._moe.num_slots, self._pool.num_pages)
        self.info = dataclasses.replace(self.info, num_slots=self.control.split.num_slots)
        self._step_clock.idle()

    def _finish_background_work(self) -> None:
        """Finish background uploads and pass on all recorded events; called when no work is left."""
        self._moe.idle()
        self._recorder.drain()

    def _tick(self) -> float:
        """Read the native clock. Only the engine's thread may; callers see its last reading."""
        virtual_us = self._moe.virtual_now_us
        self._virtual_s = None if virtual_us is None else virtual_us * 1e-6
        return self._now_s()

    def _now_s(self) -> float:
        """Seconds of the run's clock."""
        return time.perf_counter() - self._started if self._virtual_s is None else self._virtual_s

    @property
    def _num_free_places(self) -> int:
        return max(self.config.max_num_seqs - len(self._scheduler.running), 0)

    @property
    def _num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._inbox)
