"""Uploads into slots on a fake device: whatever the timing, a layer finds its experts in their slots.

`stress` runs random steps (`stress.cpp`): some placed by the host layer by layer, some by the device itself from the
published table, as a replayed graph does. Every read of a slot is compared byte by byte, at the kernel's begin and end,
and copies write garbage until they have ended.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold import _core

POLICIES = [p.name for p in _core.cache_policies() if not p.offline and p.prefetches != "never"]

shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "num_layers": st.integers(1, 5),
        "num_experts": st.integers(4, 10),
        "top_k": st.integers(1, 3),
        "slots_per_layer": st.integers(0, 10),
        "num_staging": st.integers(0, 12),
        "policy": st.sampled_from(POLICIES),
        "prefetch": st.booleans(),
        "pinned": st.booleans(),
        "table_steps": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "chunks": st.sampled_from([0.0, 0.5, 1.0]),
        "ahead": st.booleans(),
        "most_delay_us": st.sampled_from([0.0, 30.0, 1000.0]),
    }
)


def checked(fake: ModuleType, shape: dict[str, Any]) -> dict[str, int]:
    if "slots_per_layer" in shape:
        shape = dict(shape)
        slots = min(shape.pop("slots_per_layer"), shape["num_experts"])
        shape["num_slots"] = slots * shape["num_layers"] + shape["seed"] % 2 * (slots < shape["num_experts"])
    counts: dict[str, int] = fake.stress(**shape)
    assert counts["mixed_batches"] == 0
    return counts


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes)
def test_every_read_finds_its_expert_whatever_the_timing(fake: ModuleType, shape: dict[str, Any]) -> None:
    counts = checked(fake, shape)
    assert counts["failed"] == counts["refused"] == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_failing_copies_lose_nothing_and_are_never_read(
    fake: ModuleType, shape: dict[str, Any], fail_issue: float, fail_completion: float
) -> None:
    checked(fake, {**shape, "fail_issue": fail_issue, "fail_completion": fail_completion})


def test_the_stress_reaches_what_it_is_about(fake: ModuleType) -> None:
    total: dict[str, int] = {}
    for seed in range(20):
        shape = {
            "seed": seed,
            "policy": POLICIES[seed % 2],
            "pinned": seed % 4 != 3,
            "most_delay_us": 100.0,
            "fail_issue": 0.05,
            "fail_completion": 0.05,
            "prefetch": seed % 2 == 0,
            "table_steps": 0.5,
            "chunks": 0.3,
            "num_staging": 8,
        }
        for name, count in checked(fake, shape).items():
            total[name] = total.get(name, 0) + count
    reached = (
        "hits",
        "cpu",
        "fetched",
        "begun_ahead",
        "used_ahead",
        "landed",
        "failed",
        "held",
        "refused",
        "lost_steps",
    )
    assert {name: total[name] for name in reached if total[name] == 0} == {}
    assert total["largest_batch"] > 20


def test_without_waiting_for_readers_a_layer_finds_another_layers_expert(fake: ModuleType) -> None:
    """The check itself can fail: uploads that ignore the table's readers are caught."""

    def complaint(seed: int) -> str:
        try:
            fake.stress(seed=seed, num_steps=200, table_steps=1.0, ignore_readers=True)
        except RuntimeError as error:
            return str(error)
        return ""

    assert any("did not find expert" in complaint(seed) for seed in range(20))


def test_kernels_that_do_not_wait_for_uploads_are_caught(fake: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="did not find expert"):
        fake.stress(seed=1, num_steps=200, chunks=1.0, num_staging=8, ignore_uploads=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_of_a_larger_model(fake: ModuleType, seed: int) -> None:
    checked(
        fake,
        {
            "seed": seed,
            "num_layers": 12,
            "num_experts": 32,
            "top_k": 4,
            "num_slots": 96,
            "num_staging": 8,
            "num_steps": 2000,
            "policy": POLICIES[seed % 2],
            "most_delay_us": 50.0,
            "chunks": 0.2,
        },
    )
