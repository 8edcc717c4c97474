"""Clients of a server or a fleet: streams and conversations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

_WORDS: Final = (
    "fox",
    "king",
    "forest",
    "river",
    "castle",
    "old",
    "wise",
    "clever",
    "bird",
    "stone",
    "snow",
    "wolf",
)


@dataclass
class Streamed:
    """What a client saw of one stream."""

    text: str = ""
    error: str | None = None
    """Code of the error event, or of the HTTP answer."""
    is_done: bool = False


async def stream(
    client: httpx.AsyncClient, number: int, *, max_tokens: int, begun: asyncio.Event
) -> Streamed:
    """Stream the answer to a prompt of its own; `begun` is set at the first token."""
    seen = Streamed()
    body = {
        "model": "twofold-tales",
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                seen.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    seen.error = event["error"]["code"]
                elif event["choices"] and (text := event["choices"][0]["delta"].get("content")):
                    seen.text += text
                    begun.set()
    return seen


async def streams(url: str, *, first: int, max_tokens: int, num: int = 32, then: Any) -> list[Streamed]:
    """Run streams of the prompts from `first` on; call `then(first token events)` meanwhile."""
    begun = [asyncio.Event() for _ in range(num)]
    async with client(url) as http:
        running = [
            asyncio.create_task(stream(http, first + number, max_tokens=max_tokens, begun=begun[number]))
            for number in range(num)
        ]
        await then(begun)
        return await asyncio.gather(*running)


async def complete(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The whole answer to a conversation."""
    body = {"model": "twofold-tales", "messages": messages, "max_tokens": 8, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def prompt(number: int, num_words: int = 100) -> str:
    """A text that shares no page with another number's."""
    draw = random.Random(number)
    return " ".join(draw.choice(_WORDS) for _ in range(num_words))


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=240, limits=httpx.Limits(max_connections=64))


async def second_turn_hits(url: str, num_conversations: int) -> int:
    """Hold conversations of two turns, eight at a time; the number whose second turn found the first one's prefix."""

    async def conversation(http: httpx.AsyncClient, number: int, places: asyncio.Semaphore) -> bool:
        messages = [{"role": "user", "content": prompt(1000 + number)}]
        async with places:
            first = await complete(http, messages)
        await asyncio.sleep(random.Random(number).random())  # other conversations come in between
        async with places:
            return await finds_prefix(http, messages, first)

    places = asyncio.Semaphore(8)
    async with client(url) as http:
        hits = await asyncio.gather(
            *(conversation(http, number, places) for number in range(num_conversations))
        )
    return sum(hits)


async def round_robin_hits(urls: Sequence[str], num_conversations: int) -> int:
    """As `second_turn_hits`, with each request to the next server: all turns in one random order, one at a time."""
    turns = [number for number in range(num_conversations) for _ in range(2)]
    random.Random(0).shuffle(turns)
    begun: dict[int, dict[str, Any]] = {}
    hits = 0
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(client(url)) for url in urls]
        for place, number in enumerate(turns):
            http = servers[place % len(servers)]
            messages = [{"role": "user", "content": prompt(3000 + number)}]
            if number in begun:
                hits += await finds_prefix(http, messages, begun[number])
            else:
                begun[number] = await complete(http, messages)
    return hits


async def finds_prefix(
    http: httpx.AsyncClient, messages: list[dict[str, str]], first: dict[str, Any]
) -> bool:
    """Send the turn after the answer `first`; whether it found the prompt of that one in the prefix cache."""
    reply = first["choices"][0]["message"]["content"]
    further = [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    second = await complete(http, [*messages, *further])
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    return bool(cached >= 0.8 * first["usage"]["prompt_tokens"])
