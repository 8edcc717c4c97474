"""Two replicas that write to one PostgreSQL: traces, routing decisions, metrics, and the simulation of their run."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from twofold.telemetry import queries
from twofold.tools.lab.fleet_simulation import Arrival, ReplicaLimits, StepTimes, simulate_fleet
from twofold.tools.loadgen.arrivals import arrivals_within

from tests.server.fleet.clients import client, prompt
from tests.server.fleet.ray_cluster import serving
from tests.telemetry.postgres_server import running_server

pytestmark = pytest.mark.slow

NUM_REQUESTS = 60


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
        said = first.json()["choices"][0]["message"]["content"]
        further = {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}
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


def test_the_simulation_is_within_15_percent_of_the_run(served: tuple[str, str]) -> None:
    """Step times are fitted to one load and predict another of the same rate."""
    url, database = served
    db = queries.open_database(database)
    asyncio.run(load(url, 4.0, seed=0, num=8))
    capacity = NUM_REQUESTS / asyncio.run(load(url, 1000.0, seed=1))
    asyncio.run(load(url, 0.6 * capacity, seed=2))
    runs = [run for run in queries.runs(db) if run.replica]
    finished = wait_for(lambda: queries.finished_requests(db, runs), 2 * NUM_REQUESTS + 8)
    calibrated_s = finished[-1].finished_s
    times = fitted([queries.step_costs(db, run) for run in runs])

    asyncio.run(load(url, 0.6 * capacity, seed=3))

    def later() -> list[queries.Request]:
        return [each for each in queries.finished_requests(db, runs) if each.received_s > calibrated_s]

    found = wait_for(later, NUM_REQUESTS)
    begin_s = found[0].received_s
    arrivals = [
        Arrival(each.received_s - begin_s, each.prompt_tokens, each.completion_tokens, each.cached_tokens)
        for each in found
    ]
    simulated = simulate_fleet(arrivals, [times] * 2, ReplicaLimits())
    measured_s = np.array([each.finished_s - each.received_s for each in found])
    predicted_s = np.array([each.e2e_s for each in simulated])
    begun_s = np.array([each.at_s for each in arrivals])
    ratio = predicted_s.mean() / measured_s.mean()
    spans = (begun_s + measured_s).max(), (begun_s + predicted_s).max()
    print(
        f"mean latency: measured {measured_s.mean():.3f} s, simulated {predicted_s.mean():.3f} s: {ratio:.3f}"
    )
    print(f"last answer: measured after {spans[0]:.2f} s, simulated after {spans[1]:.2f} s; {times}")
    assert ratio == pytest.approx(1.0, abs=0.15)
    assert spans[1] / spans[0] == pytest.approx(1.0, abs=0.15)


def fitted(costs: list[queries.StepCosts]) -> StepTimes:
    decode, prefill, wall_s = (
        np.concatenate([getattr(each, name) for each in costs])
        for name in ("num_decode", "num_prefill", "wall_s")
    )
    return StepTimes.fitted(decode, prefill, wall_s)


async def load(url: str, rate: float, *, seed: int, num: int = NUM_REQUESTS) -> float:
    """Send requests with drawn lengths at Poisson times; seconds until the last answer."""
    draw = random.Random(seed)
    lengths = [(draw.randint(40, 160), draw.randint(20, 120)) for _ in range(num)]
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def one(http: httpx.AsyncClient, number: int, at_s: float) -> None:
        await asyncio.sleep(begin + at_s - loop.time())
        num_words, max_tokens = lengths[number]
        asked = body(0, max_tokens)
        asked["messages"] = [{"role": "user", "content": prompt(10_000 * (seed + 1) + number, num_words)}]
        (await http.post("/v1/chat/completions", json=asked)).raise_for_status()

    async with client(url) as http:
        due = arrivals_within(rate, num / rate, seed)
        await asyncio.gather(*(one(http, number, at_s) for number, at_s in enumerate(due)))
    return loop.time() - begin


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
