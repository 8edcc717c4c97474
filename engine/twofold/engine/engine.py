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
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

from twofold.api.config import EngineConfig
from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.errors import CapacityError, ConfigError, DeviceLostError, TwofoldError
from twofold.api.types import (
    Chunk,
    EngineFailure,
    EngineStats,
    GenerationRequest,
    MappedWeights,
    SamplingParams,
    Usage,
)
from twofold.engine.active_requests import ActiveRequests, Delivery, Speculation
from twofold.engine.adapters import Adapters, numbers_in_use
from twofold.engine.constraints import GrammarCompiler
from twofold.engine.control import LiveControl
from twofold.engine.expert_recording import ExpertRecording
from twofold.engine.failures import device_failure, error_of, raise_if_unusable, replace_device, step_failed
from twofold.engine.inbox import Inbox
from twofold.engine.loading import EngineParts, load_parts
from twofold.engine.prefix.store import PrefixStore
from twofold.engine.recording import Recorder, engine_stats
from twofold.engine.requests import (
    RequestState,
    check_pooling,
    check_request,
    check_runs,
    max_answer_tokens,
)
from twofold.engine.scheduler import Scheduler
from twofold.engine.step_clock import RunClock, StepClock
from twofold.engine.waiting import Waiter
from twofold.experts.spread import RankShare
from twofold.models import ProgressFn
from twofold.step.prefill_budget import PrefillBudget
from twofold.step.sampler import Sampler
from twofold.step.sequences import NOTHING_SCHEDULED, Schedule, ScheduledSequence, Sequence
from twofold.step.speculation import Speculator
from twofold.telemetry.sink import TelemetrySink
from twofold.vision.service import PictureService

_log = logging.getLogger(__name__)


class Engine:
    """Loads a model and serves requests from it. Create one with `Engine.load`."""

    def __init__(
        self, config: EngineConfig, parts: EngineParts, telemetry: TelemetrySink | None = None
    ) -> None:
        tokenizer, runner, info = parts.tokenizer, parts.loaded.runner, parts.info
        self.config = config
        self.tokenizer = tokenizer
        self.info = info
        self.pooling = parts.pooling
        """How the model pools hidden states."""
        self.pictures = None if parts.pictures is None else PictureService(parts.pictures)
        """Encodes pictures of prompts; None: the model reads text only."""
        self._bidirectional_pictures = parts.bidirectional_pictures
        self.vocab_size = runner.vocab_size
        self.memory_advice: Seq[str] = ()
        """Logged with a step that ran out of memory: the fit's table, and which settings to lower."""
        self.failure: EngineFailure | None = None
        """Set once a device has failed or a file of weights was changed."""
        self._eos_token_ids = tokenizer.eos_token_ids
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size)
        self._recorder = Recorder(telemetry, runner.moe, info)
        self._run_clock = RunClock(runner.moe, info.clock, parts.drafter)
        self._measures_steps = telemetry is not None
        self._inbox = Inbox()
        self._delivery = Delivery(self.cancel)
        self._numbers = itertools.count()
        self._num_steps = 0
        self._thread: threading.Thread | None = None
        self._assemble(parts)

    def _assemble(self, parts: EngineParts) -> None:
        """Compute with these parts from now on; no request is in work."""
        config, pool, info = self.config, parts.kv_pages, parts.info
        self.runner = runner = parts.loaded.runner
        self._parts, self._pool = parts, pool
        max_itl_s = None if config.max_itl_ms is None else config.max_itl_ms * 1e-3
        self._prefill_budget = PrefillBudget(config.max_num_batched_tokens, max_itl_s)
        speculation = Speculation.of(config, parts, pool)
        self.speculator = speculation and speculation.speculator
        self._scheduler = Scheduler(
            pool,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            None if config.backend == "single" else self._prefill_budget,
            by_priority=config.scheduling_policy == "priority",
            max_adapters=config.max_loras,
            draft=None if self.speculator is None else self.speculator.draft,
        )
        self._recorder.record_from(runner.moe, self.speculator)
        self._step_clock = StepClock(runner, enabled=self._measures_steps)
        self._requests = ActiveRequests(
            self._scheduler, self._inbox, self._recorder, self._delivery, self._run_clock, speculation
        )
        self._prepared = NOTHING_SCHEDULED
        """Schedule whose requests and samplers follow."""
        self._step_requests: list[RequestState] = []
        self._step_samplers: list[Sampler] = []
        self._num_step_tokens = 0
        self._cache_state, self._residency = parts.cache_state, parts.residency
        self.info = dataclasses.replace(info, replica=self.info.replica)
        self.control = LiveControl(
            config,
            parts.loaded,
            pool,
            self._scheduler,
            inbox=self._inbox,
            is_served=lambda: self._thread is not None,
            settle=self._finish_background_work,
            on_change=self._memory_changed,
        )
        self.adapters = Adapters(
            config,
            parts.adapters,
            self.control.between_steps,
            lambda: numbers_in_use(self._inbox, self._scheduler),
        )
        for name, module in config.adapters.items():
            self.adapters.load(name, module.path, module.scale)
        self.recording = ExpertRecording(config, parts.recorded, runner.moe, self.control.between_steps)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        telemetry: TelemetrySink | None = None,
        progress: ProgressFn | None = None,
        prefix_store: PrefixStore | None = None,
        replica: str = "",
        share: RankShare | None = None,
    ) -> Engine:
        """Load the model of `config` and get ready to serve.

        prefix_store: files of the prefix cache that several engines share; its owner closes it.
        replica: id of this replica in its fleet, for telemetry.
        share: rank 0's share of the weights, if other ranks hold the rest.

        Raises:
            ConfigError: a setting cannot be met.
            ModelLoadError: the model cannot be used; the message names the file and the remedy.
            CapacityError, KernelError: the device has no room, or failed.
        """
        parts = load_parts(config, progress, prefix_store, share)
        info = dataclasses.replace(parts.info, replica=replica)
        if config.load_vision and parts.pictures is None:
            raise ConfigError("--load-vision was given, but the model has no picture encoder; leave it out")
        engine = cls(config, dataclasses.replace(parts, info=info), telemetry)
        if config.load_vision and engine.pictures is not None:
            try:
                engine.pictures.load()
            except BaseException:
                engine.close()
                raise
        return engine

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
        reason = self.info.context_limit_reason
        check_request(
            request, self.vocab_size, self.max_context, by_priority=by_priority, limit_reason=reason
        )
        check_pooling(request, self.pooling)
        runs = () if request.media is None or not self._bidirectional_pictures else request.media.runs
        if self.info.accelerator.startswith("cuda"):
            check_runs(runs, self.config.max_num_batched_tokens)
        max_tokens = max_answer_tokens(request, self.max_context)

        def begin() -> RequestState:
            sequence = Sequence(
                next(self._numbers),
                request,
                list(request.prompt_token_ids),
                max_tokens,
                bidirectional=runs,
            )
            state = RequestState(
                sequence,
                self.tokenizer.detokenizer(shown=request.shown_tokens),
                self.config.seed,
                self._run_clock.now_s(),
                eos_token_ids=self._eos_token_ids,
                keep_text=self._recorder.keeps_text,
            )
            self._recorder.request(state)
            return state

        if request.adapter is None:
            self._inbox.put(request.request_id, self.check_room, begin)
            return
        with self.adapters.submitting(request.adapter):
            self._inbox.put(request.request_id, self.check_room, begin)

    def check_room(self) -> None:
        """Raise CapacityError, or UnusableEngineError, if any request would be refused now. Thread-safe."""
        raise_if_unusable(self.failure)
        if self.control.asleep:
            raise CapacityError("the server is asleep and accepts no requests until it is woken", asleep=True)
        num_free = max(self.config.max_num_seqs - len(self._scheduler.running), 0)
        if self._num_waiting >= self.config.max_waiting + num_free:
            raise CapacityError(
                f"{self.config.max_num_seqs} requests are running and {self.config.max_waiting} are waiting; try later"
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
        self._inbox.run_tasks()
        self._requests.update_from_inbox(self.max_context)
        self._delivery.wake()
        self._grammars.close()
        if self.pictures is not None:
            self.pictures.close()
        self._recorder.drain()
        self.recording.close()
        self._pool.close()
        if self._cache_state is not None:
            path, self._cache_state = self._cache_state, None
            self.runner.moe.save_cache(path)

    def generate(
        self,
        prompt_token_ids: Seq[int],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        *,
        request_id: str = "",
        endpoint: str = "generate",
        constraint: Constraint | None = None,
    ) -> Usage:
        """Answer one prompt and return when done. Without `start`, the calling thread computes.

        Without `request_id` the request gets one of its own: the last one's is freed a moment after its answer.

        Raises:
            RequestError, CapacityError: as `submit`. KernelError: the native code failed.
            KeyboardInterrupt: re-raised after the request was cancelled.
        """
        request_id = request_id or f"generate-{uuid.uuid4().hex}"
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
    def speculates(self) -> bool:
        """Whether all requests are drafted for, not only those with a prediction."""
        return self.speculator is not None and self.config.speculative_config is not None

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer of one request, in tokens."""
        return self.control.split.max_context

    def stats(self) -> EngineStats:
        with self._inbox.changed:
            counts = self._num_waiting, self._num_steps, self._inbox.draining
            return engine_stats(self._scheduler, self._pool, self._recorder, self.info.clock, *counts)

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration over the batch. False if there was nothing to do."""
        self._step_clock.begin()
        self._inbox.run_tasks()
        self._requests.update_from_inbox(self.max_context)
        if (unusable := error_of(self.failure)) is not None:
            self._fail(self._requests.all(), unusable)
        schedule = NOTHING_SCHEDULED if self.control.asleep else self._scheduler.schedule()
        if not (scheduled := schedule.items):
            self._delivery.wake()
            self._step_clock.idle()
            # While prefix-cache files are being read, check for new requests every few milliseconds.
            return self._scheduler.has_work and self._pool.wait_for_files(0.005)
        self._step_clock.scheduled()
        started_s, begin_s = time.time(), self._run_clock.read()
        if schedule.version != self._prepared.version:
            self._prepare_step(schedule, begin_s)
        requests = self._step_requests
        num_decoding, num_drafted = self._scheduler.num_decoding, self._scheduler.num_decode_tokens
        num_prefill = self._num_step_tokens - num_drafted
        measuring = self._measuring(scheduled, num_decoding, num_drafted)
        try:
            picked = self.runner.forward(self._num_steps, schedule, self._step_samplers)
            self._parts.weights.expect_unchanged()
        except (TwofoldError, ValueError, RuntimeError, MemoryError) as error:
            self._step_failed(scheduled, error)
            return True
        self._step_clock.computed()
        now_s = self._run_clock.read()
        self._requests.append_picked(scheduled, requests, picked, now_s)
        self._delivery.wake()
        wall_s = self._step_clock.end()
        clock_s = wall_s
        if self._run_clock.is_virtual:
            clock_s = now_s - begin_s + (self.speculator.newest.drafting_s if self.speculator else 0.0)
        self._prefill_budget.observe(num_prefill, num_decoding, clock_s)
        if measuring is not None:
            compute_s = now_s - begin_s if self._run_clock.is_virtual else self._step_clock.compute_s()
            measuring.step_done(scheduled, num_decoding, num_drafted, compute_s)
        if num_prefill:
            self.runner.moe.prompt_step_done()
        self._recorder.step(
            self._num_steps,
            scheduled,
            self._step_clock,
            started_s=started_s,
            wall_s=wall_s,
            begin_s=begin_s,
            clock_s=clock_s,
            num_running=len(self._scheduler.running),
            num_waiting=self._num_waiting,
            kv_use=1 - self._pool.num_free / max(self._pool.num_pages, 1),
            num_preemptions=self._scheduler.num_preemptions,
        )
        self.recording.after_step(self._num_steps)
        self._step_clock.recorded()
        self._num_steps += 1
        return True

    def _measuring(
        self, scheduled: Seq[ScheduledSequence], num_decoding: int, num_drafted: int
    ) -> Speculator | None:
        """The speculator if it learns this step's time, which begins now."""
        if self.speculator is None or not self.speculator.measures(scheduled, num_decoding, num_drafted):
            return None
        self._step_clock.compute_begins()
        return self.speculator

    def _prepare_step(self, schedule: Schedule, begin_s: float) -> None:
        """Set up state of the scheduled sequences, valid for all steps of this version."""
        self._prepared, scheduled = schedule, schedule.items
        self._step_requests = [self._requests.of(item.sequence) for item in scheduled]
        self._step_samplers = [
            state.sampler for item, state in zip(scheduled, self._step_requests, strict=True) if item.samples
        ]
        self._num_step_tokens = sum(item.num_tokens for item in scheduled)
        for state in self._step_requests:
            state.scheduled(begin_s)

    def _serve(self) -> None:
        self.runner.pool.bind_caller()  # this thread is the pool's first
        while True:
            try:
                if self.step():
                    continue
                self._finish_background_work()
            except Exception as error:  # an internal bug: fail all requests so that no caller waits for ever
                _log.exception("the engine's loop failed; all requests end with an error")
                self._fail(self._requests.all(), error)
            if not self._inbox.wait_for_work():
                return

    def _fail(self, requests: Seq[RequestState], error: Exception) -> None:
        self._requests.fail(requests, error)
        self._delivery.wake()
        self._num_steps += 1

    def _step_failed(self, scheduled: Seq[ScheduledSequence], error: Exception) -> None:
        if isinstance(error, DeviceLostError):
            self._lose_device(error)
            return
        self.failure = step_failed(self._num_steps, error, self.memory_advice) or self.failure
        if self.speculator is not None:
            self.speculator.drop(scheduled)
        self._fail(self._step_requests, error)

    def _lose_device(self, error: DeviceLostError) -> None:
        """End the running requests with the error, and let the others continue on the CPU, if that is allowed."""
        self.failure = device_failure(self._parts, error)  # before a client can know of it
        waiting = [self._requests.of(sequence) for sequence in self._scheduler.waiting]
        self._fail([state for state in self._requests.all() if state not in waiting], error)
        if self._residency is not None:
            self._residency.close()
        parts, self.failure = replace_device(self._parts, error)
        if parts is None:
            self._fail(waiting, error)
            return
        self._assemble(parts)
        self._inbox.put_back(waiting)

    def _memory_changed(self, what: Literal["resize", "sleep", "wake"]) -> None:
        """Record that memory was split differently or freed."""
        self._recorder.control(what, self.runner.moe.num_slots, self._pool.num_pages)
        self.info = dataclasses.replace(self.info, num_slots=self.control.split.num_slots)
        self._step_clock.idle()

    def _finish_background_work(self) -> None:
        """Finish background uploads and pass on all recorded events; called when no work is left."""
        self.runner.moe.executor.idle()
        self._recorder.drain()

    @property
    def _num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._inbox)
