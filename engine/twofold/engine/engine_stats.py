"""Counts of an engine at one moment."""

from __future__ import annotations

from twofold.api.types import Clock, EngineStats
from twofold.engine.kv_cache import PagePool
from twofold.engine.recording import Recorder
from twofold.engine.scheduler import Scheduler


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
