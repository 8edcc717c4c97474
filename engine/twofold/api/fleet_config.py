"""Settings of replicas on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.api.errors import ConfigError
from twofold.api.settings import Checked, setting


@dataclass(frozen=True)
class FleetConfig(Checked):
    """Replicas: one server from several engines, on Ray Serve.

    Raises:
        ConfigError: a value is out of range, or a setting needs --ray.
    """

    ray: bool = setting(
        False,
        "serve with replicas on Ray Serve: a gateway sends each request to the replica that has its prefix cached; "
        "needs twofold[ray]",
    )
    ray_address: str | None = setting(
        None, "Ray cluster to run in: auto, or HOST:PORT of its head (default: start one on this machine)"
    )
    num_replicas: int = setting(
        1, "replicas of the model; with --max-replicas the smallest number", low=1, high=1024
    )
    max_replicas: int | None = setting(
        None,
        "scale up to this many replicas by load and --slo-ttft-ms (default: no scaling)",
        low=1,
        high=1024,
    )
    num_gateways: int = setting(
        1,
        "number of gateways, the processes that accept client connections; they run on this machine, with serve.yaml "
        "on the machines of the cluster; requests fail with their gateway, so use two in a cluster",
        low=1,
        high=64,
    )
    cpus_per_replica: float = setting(
        1.0, "CPUs that Ray reserves per replica; --cpu-threads sets the threads that compute", low=0
    )
    gpus_per_replica: float = setting(0.0, "GPUs that Ray reserves per replica", low=0)
    target_ongoing_requests: float = setting(
        8.0, "scaling: running and waiting requests per replica to aim at", low=0.1
    )
    slo_ttft_ms: float | None = setting(
        None,
        "scaling: add a replica while the 95th percentile of TTFT exceeds this (default: by load alone)",
        low=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas} is less than --num-replicas {self.num_replicas}; "
                "give at least as many"
            )
