"""What the engine's thread posts reaches the loop: all of it, in order, and at one wake-up a step."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest
from twofold.api.types import Chunk
from twofold.server.bridge.models.crossing import AnswerStream, Crossing
from twofold.server.bridge.models.loop_signal import LoopSignal


@pytest.fixture
def wake_ups(monkeypatch) -> list[LoopSignal]:
    """Wake-ups of loops by other threads."""
    woken: list[LoopSignal] = []
    wake = LoopSignal.set

    def counted(self: LoopSignal) -> None:
        woken.append(self)
        wake(self)

    monkeypatch.setattr(LoopSignal, "set", counted)
    return woken


def test_a_step_wakes_the_loop_once_however_many_tokens_it_has(wake_ups) -> None:
    steps, streams = 50, 16

    async def serve() -> list[list[Chunk]]:
        crossing = Crossing()
        answers = [AnswerStream(None, crossing, f"r{index}") for index in range(streams)]  # type: ignore[arg-type]

        async def read(answer: AnswerStream) -> list[Chunk]:
            return [chunk async for batch in answer.batches() for _, chunk in batch]

        readers = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0)

        def step(number: int) -> None:
            for index, answer in enumerate(answers):
                answer.put(0, Chunk(f"{number}-{index}", (number,), "stop" if number == steps - 1 else None))
            crossing.wake()

        for number in range(steps):
            # On another thread, which has ended a step before the loop goes on.
            sender = threading.Thread(target=step, args=(number,))
            sender.start()
            sender.join()
            await asyncio.sleep(0.001)
        return await asyncio.gather(*readers)

    found = asyncio.run(asyncio.wait_for(serve(), 60))
    expected = [[f"{number}-{index}" for number in range(steps)] for index in range(streams)]
    assert [[chunk.text for chunk in chunks] for chunks in found] == expected
    assert len(wake_ups) == steps


def test_everything_crosses_in_order_and_what_waits_crosses_together(wake_ups) -> None:
    arrived: list[int] = []
    n = 20_000

    async def receive() -> None:
        crossing = Crossing()

        def send() -> None:
            for number in range(n):
                crossing.post(arrived.append, number)
                crossing.wake()

        sender = threading.Thread(target=send)
        sender.start()
        while len(arrived) < n:
            await asyncio.sleep(0.001)
        sender.join()

    asyncio.run(asyncio.wait_for(receive(), 60))
    assert arrived == list(range(n))
    assert len(wake_ups) < n / 2


def test_a_wake_up_keeps_the_interpreters_lock() -> None:
    """Another thread that waits for the lock gets it at the switch interval, not at a wake-up."""
    ran_between = []

    async def main() -> None:
        signal = LoopSignal(asyncio.get_running_loop(), lambda: None)
        ready = threading.Event()
        counter = [0]

        def spin() -> None:
            ready.set()
            while counter[0] >= 0:
                counter[0] += 1

        other = threading.Thread(target=spin)
        interval = sys.getswitchinterval()
        other.start()
        ready.wait()
        try:
            sys.setswitchinterval(1.0)
            time.sleep(0)  # begins a turn of this thread, of a second
            before = counter[0]
            for _ in range(1000):
                signal.set()
            ran_between.append(counter[0] - before)
        finally:
            sys.setswitchinterval(interval)
            counter[0] = -1_000_000_000
            other.join()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert ran_between == [0]


def test_posting_to_a_loop_that_has_ended_does_nothing() -> None:
    async def make() -> Crossing:
        return Crossing()

    crossing = asyncio.run(make())
    for _ in range(2):
        crossing.post(print, "never printed")
        crossing.wake()
