"""A fleet on Ray while a node is lost, the head's state store restarts, or a replica is slow or differs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from twofold import __version__
from twofold.api.errors import ConfigError

from tests.e2e.ports import free_port
from tests.server.fleet.clients import client, prompt, streams
from tests.server.fleet.ray_cluster import (
    fleet_settings,
    replica_processes,
    serving,
    serving_on_nodes,
    until_running,
)

pytestmark = pytest.mark.slow


def test_a_lost_node_ends_only_its_own_streams_and_is_replaced() -> None:
    with serving_on_nodes(2) as (cluster, url):
        gateway = replica_processes("gateway")[0].parent()
        lost = next(node for node in cluster.worker_nodes if _raylet(node) != gateway)

        async def lose(begun: list[asyncio.Event]) -> None:
            await asyncio.gather(*(each.wait() for each in begun))
            await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)

        seen = asyncio.run(streams(url, first=300, max_tokens=400, num=16, then=lose))
        assert all(each.is_done for each in seen)
        assert {each.error for each in seen} == {None, "replica_lost"}

        after = asyncio.run(streams(url, first=320, max_tokens=20, num=16, then=_at_once))
        assert [each.error for each in after] == [None] * 16
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
        asyncio.run(until_running())


def test_replicas_serve_while_the_head_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs Debian's redis-server")
    from ray import serve

    with redis(tmp_path) as address:
        monkeypatch.setenv("RAY_REDIS_ADDRESS", address)
        with serving_on_nodes(2) as (cluster, url):
            before = {each.pid for each in replica_processes()}
            cluster.head_node.kill_gcs_server(check_alive=False)
            seen = asyncio.run(streams(url, first=340, max_tokens=40, num=16, then=_at_once))
            assert [each.error for each in seen] == [None] * 16
            cluster.head_node.start_gcs_server()
            asyncio.run(until_running())
            assert {each.pid for each in replica_processes()} == before
            assert serve.status().applications["twofold"].status == "RUNNING"


def test_conversations_leave_a_slow_replica() -> None:
    async def turn(http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        body = {"model": "twofold-tales", "messages": messages, "max_tokens": 24, "ignore_eos": True}
        response = await http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return response.headers["x-twofold-replica"]

    async def turns(url: str, numbers: range, *further: dict[str, str]) -> list[str]:
        places = asyncio.Semaphore(6)

        async def one(http: httpx.AsyncClient, number: int) -> str:
            async with places:
                return await turn(http, [{"role": "user", "content": prompt(number)}, *further])

        async with client(url) as http:
            return await asyncio.gather(*(one(http, number) for number in numbers))

    with serving() as url:
        first = asyncio.run(turns(url, range(400, 440)))
        process = replica_processes()[0]
        with slowed(process):
            for begin in range(440, 800, 12):  # from these the router learns of it, within seconds
                if len(set(asyncio.run(turns(url, range(begin, begin + 12))))) == 1:
                    break
            reply = {"role": "assistant", "content": "Once."}, {"role": "user", "content": "And then?"}
            second = asyncio.run(turns(url, range(400, 440), *reply))
        ((fast, _),) = Counter(second).most_common(1)
        (slow,) = set(first) - {fast}
        assert first.count(slow) >= 10  # the prefixes of so many conversations were there
        assert second.count(slow) <= 8, Counter(second)


def test_a_replica_of_another_version_or_model_joins_nothing() -> None:
    from ray import serve
    from twofold.api.config import ServerConfig
    from twofold.api.fleet_config import FleetConfig
    from twofold.server.fleet.deployment import application
    from twofold.tools.cli.serve.fleet import ReplicaLoader, _as_arguments, run_application

    arguments = ("serve", *_as_arguments(fleet_settings(num_replicas=1)))
    loader = ReplicaLoader(arguments)
    with serving(num_replicas=1):
        for changed, message in (
            (
                dataclasses.replace(loader, version="0.0.1"),
                f"has Twofold {re.escape(__version__)}, the fleet has 0.0.1",
            ),
            (dataclasses.replace(loader, mark="0" * 12), "is another model"),
        ):
            with pytest.raises(ConfigError, match=message) as refused:
                run_application(application(changed, ServerConfig(), FleetConfig(cpus_per_replica=0.5)))
            assert "\n" not in str(refused.value)
            assert serve.status().applications == {}


async def _at_once(begun: list[asyncio.Event]) -> None:
    """Nothing happens meanwhile."""


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """The process gets a tenth of its time."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.02):
            process.send_signal(signal.SIGSTOP)
            ended.wait(0.18)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    """HOST:PORT of a Redis server without files."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)
