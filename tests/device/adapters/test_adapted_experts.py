"""Routed experts with adapters, in every format: the kernels' outputs are the CPU's beside a device, but for the order
of float32 additions and what that rounds otherwise (tests/device/test_rounding.py).

Both sides multiply adapters with x and h as they were before any rounding.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from twofold._core import device as launches
from twofold._testing import kernels
from twofold.blocks import ops
from twofold.device.adapters.factors import FactorBytes, FactorTable, moved
from twofold.device.adapters.products import Products
from twofold.device.adapters.step import AdaptedExperts
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.fake_device import FakeDevice
from tests.device.layer_sums import UNIT_F32, alone, as_q8, between_roundings, cpu_beside_device
from tests.device.random_layers import CPU, EXPERTS, SIZE, TOP_K, matrix, on_device
from tests.kernels.packed_experts import make_host_store, pack_expert

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
FORMATS = tuple(name for name, layout in LAYOUTS.items() if layout.quantised or name == "fp8")
RANKS = (3, 8)
ROWS = 18
MANY = ("bf16",)
"""Formats whose weights tensor cores take as they are; tests/simt has the bound for others."""
QUICK = ("f32", "bf16", "fp8", "q8_0", "q4_k", "int4")


def factors(random: np.random.Generator, rank: int) -> tuple[F32, F32]:
    """A [rank, SIZE] in bfloat16, B [SIZE, rank] in float32."""
    a = torch.from_numpy(random.standard_normal((rank, SIZE), np.float32)).bfloat16().float().numpy()
    return a, random.standard_normal((SIZE, rank), np.float32) / np.float32(4 * SIZE)


@pytest.fixture(scope="module", params=FORMATS)
def layer(request: pytest.FixtureRequest, fake: ModuleType) -> SimpleNamespace:
    """Experts of one format on both sides with two adapters, which leave some matrices alone, and rows that use one or
    the other or none."""
    pool, random = ops.ThreadPool(1), np.random.default_rng(5)
    experts = [tuple(matrix(random, pool, request.param) for _ in range(3)) for _ in range(EXPERTS)]
    store = make_host_store(pool, [experts])
    rows = torch.from_numpy(random.standard_normal((ROWS, SIZE), np.float32)).bfloat16()
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS)]).astype(np.int32)
    own_rows, table, data = ops.AdapterRows(), FactorTable((1, len(RANKS), EXPERTS, 3), 8, CPU), FactorBytes()
    parts: dict[tuple[int, int, int], tuple[F32, F32]] = {}
    for number, rank in enumerate(RANKS):
        entries = table.empty()
        for expert in range(EXPERTS):
            for which in range(3):
                if (number, expert) == (1, 2) or (number, which) == (0, 1):
                    continue
                a, b = parts[number, expert, which] = factors(random, rank)
                store.put_adapter(own_rows, number, (0, expert, which), ops.LowRank(a, b))
                first_row = SIZE if which == 1 else 0
                entries[0, expert, which] = data.factors(a, np.ascontiguousarray(b.T), first_row)
        table.put(number, entries)
    memory = data.on(CPU)
    for number in range(len(RANKS)):
        held = table._memory[:, number].numpy().view(np.uint8)
        records = np.ascontiguousarray(held).view(table.empty().dtype)[..., 0]
        table.put(number, moved(records, memory.data_ptr()))
    uses = np.arange(ROWS, dtype=np.int32) % 3 - 1
    executor = cpu_beside_device(fake, store, EXPERTS)
    own_rows.set(np.repeat(uses, TOP_K).tolist())
    return SimpleNamespace(
        format=request.param,
        layout=launches.ExpertLayout(request.param, request.param, SIZE, SIZE),
        inner=SIZE,
        matrices=[[ops.dequantise(pool, part).astype(np.float64) for part in expert] for expert in experts],
        slots=torch.stack([pack_expert(*expert) for expert in experts]),
        rows=rows,
        ids=ids,
        uses=uses,
        parts=parts,
        table=table,
        memory=memory,
        on_cpu=alone(executor, 0, rows.float().numpy(), ids),
    )


def limits_of(layer: Any, kind: str) -> F64:
    """[pairs, SIZE]: as `expert_limit`, with the adapters' products beside those of the weights."""
    x = layer.rows.double().numpy()
    encoded = as_q8(x) if kind == "q8" else x
    limits = np.empty((layer.ids.size, SIZE))
    unit = 2 * SIZE**0.5 * UNIT_F32
    nothing = np.zeros((1, SIZE)), np.zeros((SIZE, 1))
    for pair, expert in enumerate(layer.ids.reshape(-1)):
        token = pair // TOP_K
        gate, up, down = layer.matrices[expert]
        own = [layer.parts.get((layer.uses[token], expert, which), nothing) for which in range(3)]
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = [
            (a.astype(np.float64), b.astype(np.float64)) for a, b in own
        ]

        (g, error_g), (u, error_u) = (
            (
                weights @ encoded[token] + b @ (a @ x[token]),
                2
                * unit
                * (np.abs(weights) @ np.abs(encoded[token]) + np.abs(b) @ (np.abs(a) @ np.abs(x[token]))),
            )
            for weights, a, b in ((gate, gate_a, gate_b), (up, up_a, up_b))
        )
        silu = g / (1 + np.exp(-g))
        h = silu * u
        error_h = 1.1 * error_g * np.abs(u) + np.abs(silu) * error_u + 8 * UNIT_F32 * np.abs(h)
        of_weights = between_roundings(kind, h, error_h) + 2 * unit * np.abs(h)
        of_adapter = error_h + 4 * unit * np.abs(h)
        limits[pair] = np.abs(down) @ of_weights + np.abs(down_b) @ (np.abs(down_a) @ of_adapter)
    return limits


@pytest.mark.parametrize(
    ("layer", "many"),
    [
        *(pytest.param(name, False, marks=() if name in QUICK else pytest.mark.slow) for name in FORMATS),
        *((name, True) for name in MANY),
    ],
    indirect=["layer"],
)
def test_experts_of_adapted_rows_are_the_cpus(fake: ModuleType, layer: SimpleNamespace, many: bool) -> None:
    kind = kernels.device_activation(layer.format)
    native = fake.open_device()
    adapted = AdaptedExperts(Products(FakeDevice(native)), layer.table, torch.from_numpy(layer.uses))
    outputs = on_device(native, layer, many, adapted)
    error, limits = np.abs(outputs - layer.on_cpu), limits_of(layer, kind)
    assert (error <= limits).all(), (error / limits).max()
    plain = on_device(native, layer, many)
    used = np.repeat(layer.uses, TOP_K)
    np.testing.assert_array_equal(outputs[used < 0], plain[used < 0])
    changes = np.abs(outputs - plain)[used >= 0].max(1)
    assert (changes > 0).mean() > 0.8  # an adapter may leave an expert alone
    assert np.median(changes) > 100 * np.median(error)
