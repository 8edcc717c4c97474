"""The number of replicas for a load and an objective."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from twofold.api.errors import ConfigError
from twofold.api.fleet_config import FleetConfig
from twofold.server.fleet.scaling import ObjectiveScaling, wanted_replicas


@pytest.mark.parametrize(
    ("num_replicas", "num_ongoing", "ttfts_ms", "wanted"),
    [
        (2, 0.0, [], 0),
        (2, 17.0, [100.0, 80.0], 3),  # by load
        (2, 9.0, [501.0, 80.0], 3),  # one more than now
        (2, 0.0, [501.0], 3),
        (1, 80.0, [900.0], 10),  # load asks for more than the objective
        (3, 9.0, [500.0], 2),  # the objective is met
    ],
)
def test_wanted_replicas(num_replicas: int, num_ongoing: float, ttfts_ms: list[float], wanted: int) -> None:
    found = wanted_replicas(num_replicas, num_ongoing, ttfts_ms, target_ongoing=8, slo_ttft_ms=500)
    assert found == wanted


def test_without_an_objective_the_load_decides() -> None:
    assert wanted_replicas(4, 9, [1e6], target_ongoing=8, slo_ttft_ms=None) == 2


def test_the_policy_keeps_the_bounds() -> None:
    def decided(metrics: dict[str, Any] | None) -> int:
        context = SimpleNamespace(
            current_num_replicas=2,
            aggregated_metrics=metrics,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=3,
        )
        return ObjectiveScaling(8.0, 500.0)(cast(Any, context))[0]

    assert decided(None) == 1
    assert decided({"num_ongoing": {"a": 60.0, "b": 40.0}}) == 3
    assert decided({"ttft_p95_ms": {"a": 700.0, "b": 0.0}}) == 3


def test_bounds_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-replicas 1 is less than --num-replicas 2"):
        FleetConfig(num_replicas=2, max_replicas=1)
