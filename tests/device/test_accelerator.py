"""The accelerator on a fake device: experts run from its slots and give what the CPU alone gives.

The fake module stands where twofold._cuda would, so that the whole way is the shipped one: the choice, the slots'
memory, uploads in real time on the fake clock, the books.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from twofold import _core
from twofold.api.errors import CapacityError, KernelError
from twofold.blocks import ops
from twofold.tools.lab.systems import SYSTEMS
from twofold.weights.weight_format import WeightMatrix

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 8, 2, 64, 32
FIGURES = {
    "handshake_us": 5.0,
    "cpu_bandwidth_gbps": 0.05,
    "cpu_gflops": 1000.0,
    "cpu_expert_overhead_us": 1.0,
    "gpu_launch_us": 2.0,
    "vram_bandwidth_gbps": 100.0,
    "gpu_gflops": 1e5,
    "link_latency_us": 4.0,
    "link_bandwidth_gbps": 1.0,
    "contention": 0.2,
    "join_us": 1.0,
}


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


@pytest.fixture(scope="module")
def store(pool: ops.ThreadPool) -> _core.ExpertStore:
    random = np.random.default_rng(0)
    made = _core.ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, [("f32", "f32", "f32")] * LAYERS)

    def matrix(rows: int, columns: int) -> WeightMatrix:
        return WeightMatrix(random.standard_normal((rows, columns), np.float32), "f32", columns)

    for layer in range(LAYERS):
        experts = [
            (matrix(INTERMEDIATE, HIDDEN), matrix(INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE))
            for _ in range(EXPERTS)
        ]
        made.put(pool, layer, 0, experts)
    return made


def cost(store: _core.ExpertStore) -> _core.CostModel:
    profile = _core.MachineProfile.from_fields("fake", FIGURES)
    return _core.CostModel(profile, store.expert_bytes, store.flops_per_token, ())


def on_device(
    fake: ModuleType,
    pool: ops.ThreadPool,
    store: _core.ExpertStore,
    *,
    num_slots: int = 8,
    policy: str = "payback",
    prefetch: bool = False,
    preload: bool = False,
    rules: dict[str, object] | None = None,
    **device: object,
) -> tuple[_core.MoeExecutor, object]:
    accelerator = fake.open_device(**device).accelerator(
        store,
        cost(store),
        _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots, policy, prefetch, **(rules or {})),
    )
    return _core.MoeExecutor.on_device(pool, store, accelerator, preload), accelerator


def play(executor: _core.MoeExecutor, num_steps: int, seed: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    results = []
    for step in range(num_steps):
        tokens = 1 if step % 5 else 4
        executor.begin_step(step, list(range(tokens)), [7] * tokens)
        hidden = random.standard_normal((tokens, HIDDEN), np.float32)
        for layer in range(LAYERS):
            preferred = (np.arange(TOP_K + 1) + step // 6) % EXPERTS
            ids = np.stack([random.permutation(preferred)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
            weights = random.random((tokens, TOP_K), np.float32)
            normed = np.ascontiguousarray(hidden / np.abs(hidden).max())
            executor.forward(layer, normed, ids, weights, hidden)
        executor.end_step()
        results.append(hidden.copy())
    return results


@pytest.mark.parametrize("policy", ["payback", "lru"])
@pytest.mark.parametrize("num_slots", [0, 6, LAYERS * EXPERTS])
@pytest.mark.parametrize("refuse_pinning", [False, True])
def test_results_are_those_of_the_cpu_bit_for_bit(
    fake: ModuleType,
    pool: ops.ThreadPool,
    store: _core.ExpertStore,
    policy: str,
    num_slots: int,
    refuse_pinning: bool,
) -> None:
    plain = play(_core.MoeExecutor(pool, store), 40)
    executor, accelerator = on_device(
        fake,
        pool,
        store,
        num_slots=num_slots,
        policy=policy,
        refuse_pinning=refuse_pinning,
        most_delay_us=20.0,
        preload=num_slots == LAYERS * EXPERTS,
    )
    np.testing.assert_array_equal(np.concatenate(play(executor, 40)), np.concatenate(plain))
    counts = executor.counts()
    assert counts["hits"] > 0 or num_slots < LAYERS * EXPERTS
    assert counts["fetched"] + counts["hits"] > 0
    warning = accelerator.warning  # type: ignore[attr-defined]
    assert ("could not be pinned" in warning) == refuse_pinning


@pytest.mark.parametrize(
    ("rules", "policy", "all_misses_fetched"),
    [
        ({"fetch_rule": "all", "background_uploads": False, "always_cache_fetched": True}, "lru", True),
        ({"fetch_rule": "none"}, "lru", False),
        (SYSTEMS["freetoken"].options, "lru", None),
        (SYSTEMS["hybrimoe"].options, "mrs", None),
    ],
)
def test_other_engines_rules_decide_otherwise_and_answer_the_same(
    fake: ModuleType,
    pool: ops.ThreadPool,
    store: _core.ExpertStore,
    rules: dict[str, object],
    policy: str,
    all_misses_fetched: bool | None,
) -> None:
    plain = play(_core.MoeExecutor(pool, store), 30)
    given = {name: value for name, value in rules.items() if name != "policy"}
    executor, accelerator = on_device(fake, pool, store, policy=policy, rules=given, tick_us=5.0)
    np.testing.assert_array_equal(np.concatenate(play(executor, 30)), np.concatenate(plain))
    counts = executor.counts()
    table = np.array(accelerator.split_table()).reshape(TOP_K + 1, TOP_K + 1)  # type: ignore[attr-defined]
    assert counts["hits"] > 0
    if all_misses_fetched is not None:
        assert (counts["cpu_misses"] == 0) == all_misses_fetched
        assert (counts["fetched"] == 0) != all_misses_fetched
        assert list(table[0]) == (list(range(TOP_K + 1)) if all_misses_fetched else [0] * (TOP_K + 1))


def test_failing_uploads_run_on_the_cpu_and_change_no_result(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore
) -> None:
    plain = play(_core.MoeExecutor(pool, store), 30)
    executor, accelerator = on_device(fake, pool, store, fail_issue=0.3)
    np.testing.assert_array_equal(np.concatenate(play(executor, 30)), np.concatenate(plain))
    executor.idle()
    uploads = fake.upload_counts(accelerator)
    assert uploads["failed"] > 0
    assert executor.counts()["uploads"] == uploads["landed"]


def test_a_device_that_accepts_no_upload_is_an_error_with_the_reason(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore
) -> None:
    executor, _ = on_device(fake, pool, store, fail_issue=1.0)
    with pytest.raises(KernelError, match="uploads in a row"):
        play(executor, 40)


def test_no_room_for_slots_names_the_flags(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore
) -> None:
    with pytest.raises(CapacityError, match="lower --gpu-experts-ratio, --num-gpu-experts"):
        on_device(fake, pool, store, total_bytes=100_000)


def test_every_upload_is_reported_once_with_its_times(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore
) -> None:
    executor, accelerator = on_device(fake, pool, store, num_slots=6)
    play(executor, 30)
    executor.idle()
    rows = executor.drain_events()["upload"]
    counts = fake.upload_counts(accelerator)
    assert len(rows) == counts["landed"] == executor.counts()["uploads"] > 0
    assert int(rows["size_bytes"].sum()) == counts["bytes"] == executor.counts()["h2d_bytes"]
    assert (rows["queued_us"] <= rows["begin_us"]).all()
    assert (rows["begin_us"] < rows["end_us"]).all()
    order = np.argsort(rows["begin_us"], kind="stable")
    assert (rows["begin_us"][order][1:] >= rows["end_us"][order][:-1] - 1e-6).all()  # one link


def test_the_link_is_corrected_by_what_is_measured(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore
) -> None:
    executor, accelerator = on_device(fake, pool, store, num_slots=6, bandwidth_gbps=0.1)
    play(executor, 200)
    assert fake.link_correction(accelerator) > 2


def test_cache_state_survives(
    fake: ModuleType, pool: ops.ThreadPool, store: _core.ExpertStore, tmp_path: Path
) -> None:
    executor, _ = on_device(fake, pool, store)
    play(executor, 40)
    executor.idle()
    executor.save_cache(str(tmp_path / "cache"))
    again, _ = on_device(fake, pool, store)
    assert again.restore_cache(str(tmp_path / "cache")) == 8
    np.testing.assert_array_equal(
        np.concatenate(play(again, 10, seed=3)),
        np.concatenate(play(_core.MoeExecutor(pool, store), 10, seed=3)),
    )
