"""What the engine's thread posts reaches the loop: all of it, in order, and at one wake-up a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from twofold.api.types import Chunk
from twofold.server.bridge.models.crossing import AnswerStream, Crossing


@pytest.fixture
def wake_ups(monkeypatch) -> list[Callable[..., object]]:
    """Wake-ups of loops by other threads."""
    woken: list[Callable[..., object]] = []
    wake = asyncio.BaseEventLoop.call_soon_threadsafe

    def counted(self, callback, *arguments, **more):
        woken.append(callback)
        return wake(self, callback, *arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", counted)
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
    assert [callback.__name__ for callback in wake_ups].count("_deliver") == steps


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


def test_posting_to_a_loop_that_has_ended_does_nothing() -> None:
    async def make() -> Crossing:
        return Crossing()

    crossing = asyncio.run(make())
    for _ in range(2):
        crossing.post(print, "never printed")
        crossing.wake()
