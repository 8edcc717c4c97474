"""A Ray instance of the tests' own with the application in it, and clients of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil

from tests.server.fleet.clients import free_port


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """URL of the bundled model, served by replicas with the settings of `twofold serve`."""
    # One Ray of its own: no usage reports, no dashboard, few bytes of shared memory.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve
    from twofold.tools.cli.serve.fleet import build

    port = free_port()
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(fleet_settings(**settings)), name="twofold", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def fleet_settings(**settings: Any) -> dict[str, Any]:
    """Settings of a small fleet; `settings` override them."""
    small = {"num_replicas": 2, "cpus_per_replica": 0.5, "cpu_threads": 1, "auto_fit": False}
    return {**small, "accelerator": "none", "seed": 1} | settings


def replica_processes() -> list[psutil.Process]:
    """The replicas' processes, started by this one."""
    ours = psutil.Process().children(recursive=True)
    return [
        each
        for each in ours
        if any("ServeReplica:twofold:twofold-replica" in word for word in each.cmdline())
    ]
