"""Passes the engine's events to the telemetry sink and keeps the few figures that `stats` reports.

Nothing here waits for a database. Without a sink only the figures are kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy.typing as npt

from twofold.api.types import (
    Clock,
    ControlRecord,
    EngineStats,
    PlacementCounts,
    RunInfo,
    SpeculationCounts,
    StepRecord,
)
from twofold.engine.kv_cache import PagePool
from twofold.engine.requests import RequestState
from twofold.engine.scheduler import Scheduler
from twofold.engine.step_clock import StepClock
from twofold.experts.moe import MoeRuntime
from twofold.step.sequences import ScheduledSequence
from twofold.step.speculation import NO_DRAFTS, Speculator
from twofold.telemetry.routing import RoutingRows
from twofold.telemetry.sink import TelemetrySink

# Draining the event rings at every step would cost a decode step of a small model several percent.
_DRAIN_EVERY_S = 0.05
_RATE_SMOOTHING = 0.1


class Recorder:
    """Telemetry front end of one engine. Only its thread calls it, except `request` at submission."""

    def __init__(self, sink: TelemetrySink | None, moe: MoeRuntime, info: RunInfo) -> None:
        self._speculator: Speculator | None = None
        self._sink = sink
        self._records_events = sink is not None and sink.takes_events
        self._moe = moe
        self._info = info
        self._routing: dict[int, RoutingRows] = {}
        self.keeps_text = sink is not None and sink.wants_text
        """Whether requests are recorded with the text of their answers."""
        self._last_drain = 0.0
        self._num_preemptions = 0
        self.placement = PlacementCounts()
        self.prefetch: Mapping[str, int] = {}
        self.decode_tokens_per_s = 0.0
        """Speed of recent decode-only steps, on the run's clock; 0 before the first."""
        self.step_tokens: Counter[int] = Counter()
        """Number of steps by their token count."""
        if sink is not None:
            sink.begin_run(info)

    def record_from(self, moe: MoeRuntime, speculator: Speculator | None) -> None:
        """Record what these compute from now on."""
        self._moe, self._speculator = moe, speculator
        moe.executor.events_enabled = self._records_events

    @property
    def dynamic_update(self) -> Mapping[str, int]:
        return self._moe.dynamic_update.counts

    @property
    def speculation(self) -> SpeculationCounts | None:
        """Counts of drafts; None without drafts."""
        return self._speculator.counts if self._speculator else None

    def watch_routing(self, number: int) -> None:
        """Record the routing of request `number` from now on, until `take_routing`."""
        self._routing[number] = RoutingRows(self._info.num_layers, self._info.num_experts, self._info.top_k)
        self._moe.executor.events_enabled = True

    def take_routing(self, number: int) -> npt.NDArray[Any] | None:
        """Routing of a watched request, [tokens, MoE layers, top_k]; None for any other request."""
        if number not in self._routing:
            return None
        self.drain()
        rows = self._routing.pop(number)
        if not self._routing and not self._records_events:
            self._moe.executor.events_enabled = False
        return rows.arrays()[0]

    def request(self, answer: RequestState) -> None:
        """Record a request: on submission, first token or finish."""
        if self._sink is not None:
            self._sink.request(answer.record())

    def control(self, kind: Literal["resize", "sleep", "wake"], num_slots: int, num_pages: int) -> None:
        """Record a change of the engine with the sizes in effect from now on."""
        if self._sink is not None:
            self._sink.control(ControlRecord(time.time(), kind, num_slots, num_pages))

    def step(
        self,
        number: int,
        scheduled: Seq[ScheduledSequence],
        clock: StepClock,
        *,
        started_s: float,
        wall_s: float,
        begin_s: float,
        clock_s: float,
        num_running: int,
        num_waiting: int,
        kv_use: float,
        num_preemptions: int,
    ) -> None:
        """Record a finished step. `begin_s` and `clock_s` are its begin and duration on the run's clock, `kv_use` the
        share of the KV pages in use, `num_preemptions` the engine's so far."""
        num_tokens = sum(item.num_tokens for item in scheduled)
        num_sequences = sum(item.num_tokens == 1 + len(item.drafts) and item.samples for item in scheduled)
        drafts = NO_DRAFTS if self._speculator is None else self._speculator.newest
        num_decode = num_sequences + drafts.num_drafted
        num_prefill = num_tokens - num_decode
        self.step_tokens[num_tokens] += 1
        if num_prefill == 0 and clock_s > 0:
            rate, previous = (num_sequences + drafts.num_accepted) / clock_s, self.decode_tokens_per_s
            self.decode_tokens_per_s = previous + _RATE_SMOOTHING * (rate - previous) if previous else rate
        if self._sink is not None:
            parts, emulated = clock.parts()
            counters = clock.counters()
            # A call of StepRecord takes 3 us more.
            self._sink.step(
                StepRecord._make(
                    (
                        number,
                        started_s,
                        num_prefill,
                        num_decode,
                        num_running,
                        num_waiting,
                        clock_s * 1e6,
                        wall_s * 1e6,
                        parts,
                        emulated,
                        *counters[:3],
                        begin_s * 1e6,
                        drafts.num_drafted,
                        drafts.num_accepted,
                        drafts.estimated_s * 1e6,
                        kv_use,
                        num_preemptions - self._num_preemptions,
                        *counters[3:],
                        *clock.placed(),
                    )
                )
            )
            self._num_preemptions = num_preemptions
        # A single prefill step can fill a large part of the rings.
        if num_prefill or time.perf_counter() - self._last_drain > _DRAIN_EVERY_S:
            self.drain()

    def drain(self) -> None:
        """Pass on everything in the native event rings."""
        self._last_drain = time.perf_counter()
        self.placement = self._moe.counts()
        self.prefetch = self._moe.scheduler_counts()["prefetch"]
        if not self._records_events and not self._routing:
            return
        events = self._moe.drain_events()
        tokens = events["token_layer"]
        for number, routing in self._routing.items():
            routing.add(tokens[tokens["request"] == number])
        if self._sink is None or not self._records_events:
            return
        for kind, rows in events.items():
            if len(rows):
                self._sink.native_events(kind, rows)
        for kind, count in self._moe.executor.take_dropped().items():
            if count:
                self._sink.dropped(kind, count)


def engine_stats(
    scheduler: Scheduler,
    pool: PagePool,
    recorder: Recorder,
    clock: Clock,
    num_waiting: int,
    num_steps: int,
    draining: bool,
) -> EngineStats:
    """The counts; call with the inbox's lock held."""
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=num_waiting,
        num_free_pages=pool.num_free,
        num_pages=pool.num_pages,
        num_free_records=pool.num_free_records,
        num_records=pool.num_records,
        num_steps=num_steps,
        decode_tokens_per_s=recorder.decode_tokens_per_s,
        clock=clock,
        placement=recorder.placement,
        draining=draining,
        prefix_cache_queries=pool.num_queries,
        prefix_cache_hits=pool.num_hits,
        prefetch=recorder.prefetch,
        dynamic_update=recorder.dynamic_update,
        num_preemptions=scheduler.num_preemptions,
        step_tokens=dict(recorder.step_tokens),
        speculation=recorder.speculation,
    )
