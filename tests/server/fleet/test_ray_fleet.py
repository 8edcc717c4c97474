"""Real replicas on a real Ray Serve: conversations find their prefix, lost replicas and updates lose no request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from tests.server.fleet.clients import second_turn_hits, streams
from tests.server.fleet.ray_cluster import deploy, replica_processes, serving, until_running

pytestmark = pytest.mark.slow

NUM_CONVERSATIONS = 200
NUM_STREAMS = 32


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(max_waiting=255) as address:
        yield address


def test_second_turns_find_their_prefix(url: str) -> None:
    hits = asyncio.run(second_turn_hits(url, NUM_CONVERSATIONS))
    assert hits >= 0.95 * NUM_CONVERSATIONS  # round robin over two replicas would find half


def test_a_replica_killed_before_the_first_token_loses_no_request(url: str) -> None:
    async def kill_at_once(begun: list[asyncio.Event]) -> None:
        await asyncio.sleep(0.05)
        replica_processes()[0].kill()

    seen = asyncio.run(streams(url, first=0, max_tokens=40, then=kill_at_once))
    lost_early = [each for each in seen if each.error is not None and not each.text]
    assert lost_early == []
    assert all(each.is_done for each in seen)
    asyncio.run(until_running())


def test_a_replica_killed_in_the_middle_ends_its_streams_with_an_error(url: str) -> None:
    async def kill_in_the_middle(begun: list[asyncio.Event]) -> None:
        await asyncio.gather(*(each.wait() for each in begun))
        replica_processes()[0].kill()

    before = asyncio.run(streams(url, first=100, max_tokens=400, num=4, then=lambda begun: asyncio.sleep(0)))
    seen = asyncio.run(streams(url, first=100, max_tokens=400, then=kill_in_the_middle))
    failed = [each for each in seen if each.error is not None]
    assert {each.error for each in failed} == {"replica_lost"}
    assert all(each.text and each.is_done for each in seen)  # an error, never a silent end
    assert 0 < len(failed) < NUM_STREAMS
    for whole, again in zip(before, seen[:4], strict=True):
        assert whole.text.startswith(again.text)  # what arrived is right
        assert again.error is not None or again.text == whole.text
    asyncio.run(until_running())


def test_a_rolling_update_loses_no_stream(url: str) -> None:
    old = {each.pid for each in replica_processes()}

    async def update(begun: list[asyncio.Event]) -> None:
        await asyncio.gather(*(each.wait() for each in begun))
        await asyncio.to_thread(deploy, port=int(url.rpartition(":")[2]), ray=True, max_waiting=254)

    seen = asyncio.run(streams(url, first=200, max_tokens=200, then=update))
    assert [each.error for each in seen] == [None] * NUM_STREAMS
    assert all(each.is_done for each in seen)
    deadline = time.monotonic() + 60
    while old & {each.pid for each in replica_processes()} and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not old & {each.pid for each in replica_processes()}


def test_errors_pass_through_in_each_dialect(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        openai = http.post(
            "/v1/chat/completions", json={"model": "other", "messages": [{"role": "user", "content": "a"}]}
        )
        anthropic = http.post("/v1/messages", json={"model": "other", "max_tokens": 1, "messages": []})
        assert (openai.status_code, openai.json()["error"]["code"]) == (404, "model_not_found")
        assert anthropic.json()["type"] == "error"
        assert http.get("/health").json()["status"] == "ready"
