"""Gateway and replicas as one Ray Serve application."""

from __future__ import annotations

from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from twofold.api.config import ServerConfig
from twofold.api.fleet_config import FleetConfig
from twofold.server.fleet.gateway import GatewayActor
from twofold.server.fleet.replica import ModelLoader, Replica
from twofold.server.fleet.routing import PrefixRouter

_STATS_PERIOD_S: Final = 1.0
"""How often replicas publish their prefixes. Until then the gateway counts what it sent itself."""
_MAX_STARTS: Final = 3
"""Failed starts after which a deployment is given up. A wrong setting fails at once, a full machine may recover."""
_CLOSE_S: Final = 10.0
"""Time for a replica to close its engine and telemetry after its last answer."""


def application(
    load: ModelLoader, server: ServerConfig, fleet: FleetConfig, gateway_node: str = ""
) -> Application:
    """The application, to be run by `ray.serve.run` or built for a cluster's serve.yaml.

    gateway_node: address of the machine that runs the gateways. If it is empty, Ray spreads them over the cluster.
    """
    is_one_machine = fleet.ray and fleet.ray_address is None
    replica = serve.deployment(
        Replica,
        name="twofold-replica",
        **_number(fleet),
        ray_actor_options={"num_cpus": fleet.cpus_per_replica, "num_gpus": fleet.gpus_per_replica},
        graceful_shutdown_timeout_s=server.drain_timeout_s + _CLOSE_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
        max_constructor_retry_count=_MAX_STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_routing_stats_period_s=_STATS_PERIOD_S,
        ),
    )
    gateway = serve.deployment(
        GatewayActor,
        name="twofold-gateway",
        num_replicas=fleet.num_gateways,
        # A new gateway listens before the old one stops.
        max_surge_percent=100,
        max_constructor_retry_count=_MAX_STARTS,
        ray_actor_options={
            "num_cpus": 0,
            "resources": {f"node:{gateway_node}": 0.001} if gateway_node else {},
            # Read when Ray Serve is imported: one change of thread less per request.
            "runtime_env": {"env_vars": {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}},
        },
        graceful_shutdown_timeout_s=server.drain_timeout_s + _CLOSE_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return gateway.bind(replica.bind(load, server, "127.0.0.1" if is_one_machine else ""), server)


def _number(fleet: FleetConfig) -> dict[str, Any]:
    if fleet.max_replicas is None:
        return {"num_replicas": fleet.num_replicas}
    policy = AutoscalingPolicy(
        policy_function="twofold.server.fleet.scaling:ObjectiveScaling",
        policy_kwargs={"target_ongoing": fleet.target_ongoing_requests, "slo_ttft_ms": fleet.slo_ttft_ms},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fleet.num_replicas,
            max_replicas=fleet.max_replicas,
            target_ongoing_requests=fleet.target_ongoing_requests,
            upscale_delay_s=5.0,
            downscale_delay_s=120.0,
            policy=policy,
        )
    }
