"""Two replicas that write to one PostgreSQL: traces, routing decisions and metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from twofold.telemetry import queries

from tests.server.fleet.clients import prompt
from tests.server.fleet.ray_cluster import serving
from tests.telemetry.postgres_server import running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """(URL of the fleet, URL of its database)"""
    with running_server() as server:
        database = server.new_database("fleet")
        with serving(telemetry_url=database) as url:
            yield url, database


def body(number: int, max_tokens: int, *further: dict[str, str]) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt(number)}, *further]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


def test_requests_are_followed_from_the_router_to_their_replica(served: tuple[str, str]) -> None:
    url, database = served
    trace = "0af7651916cd43dd8448eb211c80319c"
    with httpx.Client(base_url=url, timeout=60) as http:
        given = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        first = http.post("/v1/chat/completions", json=body(1, 8), headers=given)
        reply = first.json()["choices"][0]["message"]["content"]
        further = {"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}
        second = http.post("/v1/chat/completions", json=body(1, 8, *further))
        assert first.headers["traceresponse"] == given["traceparent"]
        made = second.headers["traceresponse"].split("-")[1]
        page = http.get("/metrics").text
    replicas = set(re.findall(r'replica="(\w+)"', page))
    assert len(replicas) == 2
    assert first.headers["x-twofold-replica"] == second.headers["x-twofold-replica"] in replicas
    assert len(re.findall(r"^# TYPE vllm:num_requests_running ", page, re.MULTILINE)) == 1

    db = queries.open_database(database)
    found = wait_for(lambda: queries.traced(db, trace) + queries.traced(db, made), 2)
    assert [request.routed_by for request in found] == ["load", "prefix"]
    assert found[1].cached_tokens > 0.8 * found[0].prompt_tokens
    run = next(run for run in queries.runs(db) if run.run_id == found[0].run_id)
    assert run.replica == first.headers["x-twofold-replica"]
    fleet = queries.fleet(db, run, queries.window(run))
    assert {replica.run.replica for replica in fleet} == replicas
    assert all(replica.run.is_live() for replica in fleet)


def wait_for(read: object, at_least: int) -> list[queries.Request]:
    """What `read` returns once the writers have stored so many rows."""

    async def poll() -> list[queries.Request]:
        for _ in range(200):
            found: list[queries.Request] = read()  # type: ignore[operator]
            if len(found) >= at_least:
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"{len(found)} of {at_least} rows after 20 s")

    return asyncio.run(poll())
