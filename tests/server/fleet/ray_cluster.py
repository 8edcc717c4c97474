"""A Ray instance of the tests' own with the application in it, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil

from tests.e2e.ports import free_port


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """URL of the bundled model, served by replicas with the settings of `twofold serve`."""
    # One Ray of its own: no usage reports, no dashboard, few bytes of shared memory.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        serve.start(proxy_location="Disabled")
        deploy(port=port, ray=True, **settings)
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@contextlib.contextmanager
def serving_on_nodes(num_nodes: int, **settings: Any) -> Iterator[tuple[Any, str]]:
    """Ray's cluster of a head without CPUs and nodes of one CPU, all on this machine, and the URL of its fleet."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    port, store = free_port(), 100 * 2**20
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=store, include_dashboard=False)
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, object_store_memory=store)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        deploy(port=port, cpus_per_replica=1, **settings)
        yield cluster, f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def deploy(**settings: Any) -> None:
    """Run, or change, the fleet with these settings."""
    from ray import serve
    from twofold.tools.cli.serve.fleet import build

    serve.run(build(fleet_settings(**settings)), name="twofold", route_prefix=None)


def fleet_settings(**settings: Any) -> dict[str, Any]:
    """Settings of a small fleet; `settings` override them."""
    small = {"num_replicas": 2, "cpus_per_replica": 0.5, "cpu_threads": 1, "auto_fit": False}
    return {**small, "accelerator": "none", "seed": 1} | settings


def replica_processes(deployment: str = "replica") -> list[psutil.Process]:
    """The processes of a deployment's actors, started by this one."""
    ours = psutil.Process().children(recursive=True)
    name = f"ServeReplica:twofold:twofold-{deployment}"
    return [each for each in ours if any(name in word for word in _command(each))]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


async def until_running(num_replicas: int = 2) -> None:
    """Wait until Ray has replaced lost replicas and the new ones have loaded their model."""
    from ray import serve

    for _ in range(900):
        deployment = serve.status().applications["twofold"].deployments["twofold-replica"]
        # Ray notices a lost replica late. Its successor has a process first and is RUNNING once loaded.
        states = deployment.replica_states
        is_running = deployment.status == "HEALTHY" and states.get("RUNNING") == num_replicas
        if len(replica_processes()) == num_replicas and is_running:
            await asyncio.sleep(2.0)  # the gateway hears of it by a long poll
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the replicas are {deployment.replica_states}")
