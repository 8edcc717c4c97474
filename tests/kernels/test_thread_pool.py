"""The thread pool: every chunk once, errors reach the caller, no call hangs, idle threads use no time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from twofold._testing import kernels
from twofold.api.errors import ConfigError, KernelError
from twofold.blocks import ops


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [0, 1, 2, 7, 1000])
def test_every_chunk_runs_once(threads: int, chunks: int) -> None:
    pool = ops.ThreadPool(threads)
    assert pool.num_threads == threads
    assert np.array_equal(kernels.count_chunks(pool, chunks, repeats=50), np.full(chunks, 50))


def test_many_short_loops_in_a_row() -> None:
    """Workers that come late to one loop meet the next: none may be lost, run twice or run on old data."""
    pool = ops.ThreadPool(4)
    for chunks in (2, 3, 5):
        assert np.array_equal(kernels.count_chunks(pool, chunks, repeats=20_000), np.full(chunks, 20_000))


def test_loops_from_several_threads_take_turns() -> None:
    pool = ops.ThreadPool(3)
    results: list[np.ndarray] = []

    def run() -> None:
        results.append(kernels.count_chunks(pool, 13, repeats=2_000))

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert all(np.array_equal(counts, np.full(13, 2_000)) for counts in results)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_reaches_the_caller_and_the_pool_lives_on(threads: int) -> None:
    pool = ops.ThreadPool(threads)
    for fail_at in (0, 1, 63):
        with pytest.raises(KernelError, match=f"chunk {fail_at} must fail"):
            kernels.count_chunks(pool, 64, fail_at=fail_at)
        assert np.array_equal(kernels.count_chunks(pool, 64), np.ones(64))


def test_a_pool_wakes_after_sleep() -> None:
    before = thread_ids()
    pool = ops.ThreadPool(4)
    workers = thread_ids() - before
    for _ in range(5):
        wait_until_asleep(workers)
        assert np.array_equal(kernels.count_chunks(pool, 100), np.ones(100))


def test_an_idle_pool_uses_no_cpu() -> None:
    before = thread_ids()
    pool = ops.ThreadPool(4)
    workers = thread_ids() - before
    kernels.count_chunks(pool, 100)
    wait_until_asleep(workers)
    assert pool.num_threads == 1 + len(workers) == 4


def wait_until_asleep(threads: set[str]) -> None:
    """Waits until these threads have used under 1 % of a core over some milliseconds. Fails after a minute of unrest.

    Other tests' servers may live in this process and tick.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before, start = used_ns(threads), time.monotonic()
        threading.Event().wait(0.02)
        if used_ns(threads) - before < 0.01e9 * (time.monotonic() - start):
            return
    pytest.fail("the pool is still busy although it has nothing to do")


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def used_ns(threads: set[str]) -> int:
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads)


def test_pools_can_be_made_and_dropped_at_any_time() -> None:
    """A worker that comes from a loop just as its pool ends must notice: with the epoch read after the question
    whether the pool stops, one pool in some hundreds waited for ever for such a worker."""
    for threads in (1, 2, 5):
        for _ in range(2_000):
            pool = ops.ThreadPool(threads)
            kernels.count_chunks(pool, 3)
            del pool


def test_number_of_threads() -> None:
    assert 1 <= ops.ThreadPool(0).num_threads <= len(os.sched_getaffinity(0))
    for wrong in (-1, 5000):
        with pytest.raises(ConfigError, match=f"num_threads is {wrong}; expected 0"):
            ops.ThreadPool(wrong)
