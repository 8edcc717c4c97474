"""The number of replicas: by ongoing requests, and one more while the latency objective is missed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


def wanted_replicas(
    num_replicas: int,
    num_ongoing: float,
    ttfts_ms: Iterable[float],
    *,
    target_ongoing: float,
    slo_ttft_ms: float | None,
) -> int:
    """Replicas for the load, before the bounds of the deployment.

    Args:
        num_ongoing: running and waiting requests of all replicas.
        ttfts_ms: each replica's recent 95th percentile of TTFT; 0 without requests.
        target_ongoing: ongoing requests per replica to aim at.
        slo_ttft_ms: objective for TTFT. While a replica misses it, the number grows by one and never falls.
    """
    by_load = math.ceil(num_ongoing / target_ongoing)
    if slo_ttft_ms is None or max(ttfts_ms, default=0.0) <= slo_ttft_ms:
        return by_load
    return max(by_load, num_replicas + 1)


class ObjectiveScaling:
    """Ray Serve's autoscaling policy. Ray applies the delays of its configuration."""

    def __init__(self, target_ongoing: float, slo_ttft_ms: float | None = None) -> None:
        self._target_ongoing = target_ongoing
        self._slo_ttft_ms = slo_ttft_ms

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas within the deployment's bounds, and no state."""
        metrics = context.aggregated_metrics or {}
        wanted = wanted_replicas(
            context.current_num_replicas,
            sum(metrics.get("num_ongoing", {}).values()),
            metrics.get("ttft_p95_ms", {}).values(),
            target_ongoing=self._target_ongoing,
            slo_ttft_ms=self._slo_ttft_ms,
        )
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}
