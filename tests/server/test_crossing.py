"""What the engine's thread posts reaches the loop: all of it, in order, and not at a wake-up each."""

from __future__ import annotations

import asyncio
import threading

from twofold.server.bridge import Crossing


def test_everything_crosses_in_order_and_what_waits_crosses_together(monkeypatch) -> None:
    wake_ups, arrived, n = 0, [], 20_000

    async def receive() -> None:
        nonlocal wake_ups
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*arguments):
            nonlocal wake_ups
            wake_ups += 1
            return wake(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        crossing = Crossing()

        def send() -> None:
            for number in range(n):
                crossing.post(lambda number=number: arrived.append(number))

        sender = threading.Thread(target=send)
        sender.start()
        while len(arrived) < n:
            await asyncio.sleep(0.001)
        sender.join()

    asyncio.run(asyncio.wait_for(receive(), 60))
    assert arrived == list(range(n))
    assert wake_ups < n / 2


def test_posting_to_a_loop_that_has_ended_does_nothing() -> None:
    async def make() -> Crossing:
        return Crossing()

    crossing = asyncio.run(make())
    crossing.post(lambda: None)
    crossing.post(lambda: None)
