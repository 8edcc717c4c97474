"""Which misses of a table step with several tokens the device reads from the host, held to the cost model.

The rule (`kernels/device/read_choice.h`) adds whole nanoseconds and knows no cost model; here every layer that it
places is priced by the model itself, against every other choice.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold import _testing as testing
from twofold._core import device as launches

from tests.device.layer_sums import FIGURES

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 32, 10, 3
HIT, CPU, READ = (int(_core.Placement.__members__[name].value) for name in ("HIT", "CPU", "FETCHED"))


@pytest.fixture(scope="module")
def store() -> _core.ExpertStore:
    return _core.ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, [("f32", "f32", "f32")])


class Placer:
    """The device's choice for one layer."""

    def __init__(self, native: Any, accelerator: Any, max_tokens: int) -> None:
        self.native, self.max_tokens = native, max_tokens
        self.prices = torch.from_numpy(np.array(accelerator.read_prices(), np.uint32).view(np.int32))
        self.offsets = 512 * torch.arange(EXPERTS)
        self.split = torch.tensor(accelerator.split_table(), dtype=torch.uint8)

    def place(self, ids: Any, slots: Any, *, mapped: bool = True) -> Any:
        """[tokens, top_k] of placements."""
        tokens, pairs = len(ids), self.max_tokens * TOP_K
        held = [torch.zeros(n, dtype=t) for n, t in ((1, torch.int32), (EXPERTS, torch.int64))]
        held += [torch.zeros(n, dtype=torch.int32) for n in (EXPERTS + 1, pairs, 1)]
        where = torch.zeros(pairs, dtype=torch.uint8)
        count, weights, begin, sorted_pairs, on_cpu = held
        gates = torch.ones(pairs)
        self.native.place(
            launches.RoutedLayer(
                ids=ids.data_ptr(),
                weights=gates.data_ptr(),
                normed=gates.data_ptr(),
                num_tokens=tokens,
                layer=0,
            ),
            launches.PlacementTables(
                slots=slots.data_ptr(),
                split=self.split.data_ptr(),
                slot_base=4096,
                slot_stride=256,
                store_base=1 << 20 if mapped else 0,
                store_offsets=self.offsets.data_ptr(),
                num_experts=EXPERTS,
                prices=self.prices.data_ptr(),
            ),
            launches.PlacedLayer(
                groups=launches.ExpertGroups(
                    num_groups=count.data_ptr(),
                    weights=weights.data_ptr(),
                    begin=begin.data_ptr(),
                    pairs=sorted_pairs.data_ptr(),
                    capacity=EXPERTS,
                ),
                where=where.data_ptr(),
                num_on_cpu=on_cpu.data_ptr(),
            ),
            launches.MailboxShape(num_layers=1, max_tokens=self.max_tokens, top_k=TOP_K, hidden=HIDDEN),
            mailbox=0,
            step=0,
            stream=0,
        )
        placed = where[: tokens * TOP_K].view(tokens, TOP_K)
        assert on_cpu.item() == int((placed == CPU).sum())
        # Each group is one expert with all its pairs, at its slot or at its place in the host's store.
        flat = ids.flatten().tolist()
        for g in range(count.item()):
            mine = sorted_pairs[begin[g] : begin[g + 1]].tolist()
            expert = flat[mine[0]]
            assert mine == [p for p, e in enumerate(flat) if e == expert]
            slot = int(slots[expert])
            assert weights[g] == (4096 + 256 * slot if slot >= 0 else (1 << 20) + 512 * expert)
        return placed.numpy()


def placer(fake: ModuleType, store: Any, cost: Any, max_tokens: int = 32, **rules: Any) -> Placer:
    native = fake.open_device()
    config = _core.SchedulerConfig(1, EXPERTS, TOP_K, 0, "lru", False, **rules)
    return Placer(native, native.accelerator(store, cost, config), max_tokens)


figure = st.floats(0.0, 40.0)
rate = st.floats(0.05, 50.0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(2, 8),
    resident=st.floats(0.0, 1.0),
    once=st.tuples(figure, figure, figure, figure),
    rates=st.tuples(rate, rate, rate, rate, rate),
    contention=st.floats(0.0, 1.0),
)
def test_what_is_read_makes_the_layer_as_short_as_any_choice(
    fake: ModuleType,
    store: _core.ExpertStore,
    seed: int,
    tokens: int,
    resident: float,
    once: tuple[float, ...],
    rates: tuple[float, ...],
    contention: float,
) -> None:
    handshake, overhead, launch, latency = once
    cpu_gbps, vram_gbps, link_gbps, cpu_gflops, gpu_gflops = rates
    profile = _core.MachineProfile.from_fields(
        "random",
        {
            "handshake_us": handshake,
            "cpu_bandwidth_gbps": cpu_gbps,
            "cpu_gflops": cpu_gflops,
            "cpu_expert_overhead_us": overhead,
            "gpu_launch_us": launch,
            "vram_bandwidth_gbps": vram_gbps,
            "gpu_gflops": gpu_gflops,
            "link_latency_us": latency,
            "link_bandwidth_gbps": link_gbps,
            "contention": contention,
            "join_us": 1.0,
        },
    )
    cost = testing.CostModel(profile, store.expert_bytes, store.flops_per_token)
    random = np.random.default_rng(seed)
    preferred = random.permutation(EXPERTS)[: int(random.integers(TOP_K, EXPERTS + 1))]
    ids = np.stack([random.permutation(preferred)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    if tokens > 2:
        ids[-1] = -1  # padding
    slots = np.where(random.random(EXPERTS) < resident, np.arange(EXPERTS), -1).astype(np.int32)
    placed = placer(fake, store, cost).place(torch.from_numpy(ids), torch.from_numpy(slots))

    active, counts = np.unique(ids[ids >= 0], return_counts=True)
    load = dict(zip(active.tolist(), counts.tolist(), strict=True))
    where = {e: set(placed[ids == e].tolist()) for e in load}
    assert all(len(places) == 1 for places in where.values()), "a miss that is read serves all its pairs"
    hits = [n for e, n in load.items() if slots[e] >= 0]
    assert all((where[e] == {HIT}) == (slots[e] >= 0) for e in load)
    misses = sorted((e for e in load if slots[e] < 0), key=lambda e: (-load[e], e))

    def us(read: tuple[int, ...]) -> float:
        fetched = sorted((load[e] for e in read), reverse=True)
        return float(cost.layer(hits, fetched, [load[e] for e in misses if e not in read])[0].layer_us)

    read = tuple(e for e in misses if where[e] == {READ})
    assert read == tuple(misses[: len(read)]), "most tokens first"
    choices = itertools.chain.from_iterable(itertools.combinations(misses, n) for n in range(len(misses) + 1))
    rounding_us = 1e-3 * (3 * EXPERTS + 3)
    # Exact where an expert takes the device the time of reading its weights, whatever its tokens.
    most, least = cost.gpu_expert_us(max(load.values(), default=1)), cost.gpu_expert_us(1)
    assert us(read) <= min(map(us, choices)) + rounding_us + len(misses) * (most - least)
    assert us(read) <= min(us(tuple(misses[:n])) for n in range(len(misses) + 1)) + rounding_us
    assert all(us(tuple(misses[:n])) > us(read) - rounding_us for n in range(len(read)))


def test_where_nothing_may_be_read_nothing_is(fake: ModuleType, store: _core.ExpertStore) -> None:
    """The store is not mapped, or another engine's rule decides; and the same layer is read from otherwise."""
    fast_link = dict.fromkeys(FIGURES, 1.0) | {"link_bandwidth_gbps": 50.0}
    cost = testing.CostModel(
        _core.MachineProfile.from_fields("fast", fast_link), store.expert_bytes, store.flops_per_token
    )
    ids = torch.tensor([[0, 1, 2], [3, 1, 2]], dtype=torch.int32)
    slots = torch.full((EXPERTS,), -1, dtype=torch.int32)
    assert (placer(fake, store, cost).place(ids, slots) == READ).any()
    assert (placer(fake, store, cost).place(ids, slots, mapped=False) == CPU).all()
    assert (placer(fake, store, cost, fetch_rule="none").place(ids, slots) == CPU).all()
