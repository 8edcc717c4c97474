"""What the CPU and a device round between an expert's two products: what `rounding.h` says, kept by the kernels.

Where both round alike they differ by the order of their additions and by the few values that it puts on the other side
of a rounding (`expert_limit`). Where the CPU alone rounds otherwise, each way moves h by its own rounding, and output n
by at most the sum of |down[n, i]| times both.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from twofold import _core
from twofold._core import device as launches
from twofold._testing import kernels
from twofold.blocks import ops
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.layer_sums import alone, as_q8, cpu_beside_device, expert_limit
from tests.device.random_layers import EXPERTS, SIZE, TOP_K, matrix, on_device
from tests.kernels.kernel_levels import chosen
from tests.kernels.packed_experts import make_host_store, pack_expert

F64 = npt.NDArray[np.float64]
FORMATS = tuple(name for name, layout in LAYOUTS.items() if layout.quantised or name == "fp8")
UNIT_BF16 = 2.0**-8
"""Largest relative error of rounding to 8 bits of significand, to nearest."""


@pytest.fixture(scope="module", params=FORMATS)
def layer(request: pytest.FixtureRequest, fake: ModuleType) -> SimpleNamespace:
    """Experts of one format on both sides, and 40 bf16 rows routed to them."""
    pool, random = ops.ThreadPool(1), np.random.default_rng(5)
    experts = [tuple(matrix(random, pool, request.param) for _ in range(3)) for _ in range(EXPERTS)]
    store = make_host_store(pool, [experts])
    rows = torch.from_numpy(random.standard_normal((40, SIZE), np.float32)).bfloat16()
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(len(rows))]).astype(np.int32)
    return SimpleNamespace(
        format=request.param,
        layout=launches.ExpertLayout(request.param, request.param, SIZE, SIZE),
        inner=SIZE,
        matrices=[[ops.dequantise(pool, part).astype(np.float64) for part in expert] for expert in experts],
        slots=torch.stack([pack_expert(*expert) for expert in experts]),
        rows=rows,
        ids=ids,
        on_cpu=alone(cpu_beside_device(fake, store, EXPERTS), 0, rows.float().numpy(), ids),
        on_cpu_alone=alone(_core.MoeExecutor(pool, store), 0, rows.float().numpy(), ids),
    )


def rounding_to(kind: str, h: F64) -> F64:
    """The most that encoding h [..., SIZE] as `kind` moves each element."""
    if kind == "f32":
        return np.zeros_like(h)
    if kind == "bf16":
        return np.abs(h) * UNIT_BF16
    peaks = np.abs(h).reshape(*h.shape[:-1], -1, 32).max(-1)
    return np.repeat(peaks / 254, 32, axis=-1)


def limit(layer: Any, kinds: tuple[str, ...], inputs: str) -> F64:
    """[pairs, hidden]: what roundings of h to all of `kinds` make of an output, and the order of float32 sums."""
    x = layer.rows.double().numpy()
    x = as_q8(x) if inputs == "q8" else x
    limits = np.empty((layer.ids.size, SIZE))
    for pair, expert in enumerate(layer.ids.reshape(-1)):
        gate, up, down = layer.matrices[expert]
        g = gate @ x[pair // TOP_K]
        h = g / (1 + np.exp(-g)) * (up @ x[pair // TOP_K])
        moved = sum((rounding_to(kind, h) for kind in kinds), np.zeros_like(h))
        in_f32 = SIZE * 2.0**-23 * np.abs(h)  # of either side's sums, and of h's own
        limits[pair] = np.abs(down) @ (moved + 2 * in_f32)
    return limits


# With many tokens, other formats' weights are rounded to bf16 on their way to tensor cores; tests/simt has that
# bound.
@pytest.mark.parametrize(
    ("layer", "many"),
    [*((name, False) for name in FORMATS), ("bf16", True)],
    indirect=["layer"],
)
def test_an_expert_of_the_kernels_is_the_cpus_but_for_the_order_of_sums_and_what_that_rounds_otherwise(
    fake: ModuleType, layer: SimpleNamespace, many: bool
) -> None:
    kind = kernels.device_activation(layer.format)
    assert layer.layout.activations == kind
    assert kernels.inner_activation(chosen(layer.format), layer.format, True) == kind
    outputs = on_device(fake.open_device(), layer, many)
    x = layer.rows.double().numpy()
    x = as_q8(x) if kind == "q8" else x
    limits, unrounded = np.empty((layer.ids.size, SIZE)), np.empty((layer.ids.size, SIZE))
    for expert, matrices in enumerate(layer.matrices):
        pairs = np.flatnonzero(layer.ids.reshape(-1) == expert)
        gate, up, down = matrices
        limits[pairs] = expert_limit(matrices, x[pairs // TOP_K], kind)
        g = x[pairs // TOP_K] @ gate.T
        unrounded[pairs] = (g / (1 + np.exp(-g)) * (x[pairs // TOP_K] @ up.T)) @ down.T
    error = np.abs(outputs - layer.on_cpu)
    assert (error <= limits).all()
    assert (error > 0).any()
    if kind != "f32":  # the bound is meaningful: results without rounding are far outside
        assert (np.abs(unrounded - layer.on_cpu) > limits).mean() > 0.1


def test_beside_a_device_the_cpu_rounds_what_the_device_rounds_and_alone_what_its_level_does(
    layer: SimpleNamespace,
) -> None:
    level = chosen(layer.format)
    of_level = kernels.inner_activation(level, layer.format, False)
    beside = kernels.inner_activation(level, layer.format, True)
    assert of_level == kernels.format_kernel(level, layer.format)[0]
    assert beside == kernels.device_activation(layer.format)
    if of_level == beside:
        np.testing.assert_array_equal(layer.on_cpu, layer.on_cpu_alone)
        return
    assert not np.array_equal(layer.on_cpu, layer.on_cpu_alone)
    if of_level == "q8_token":
        return  # what it multiplies is rounded otherwise, too
    difference = np.abs(layer.on_cpu - layer.on_cpu_alone)
    assert (difference <= limit(layer, (of_level, beside), of_level)).all()


def test_what_each_level_rounds_is_as_it_is_written_down() -> None:
    """The table of rounding.h and docs/design.md."""
    for level in kernels.supported_levels():
        for name in FORMATS:
            floats = "bf16" if name == "bf16" and level in ("avx512_bf16", "amx") else "f32"
            integers = "q8_token" if name.endswith("_channel") else "q8"
            expected = floats if name in ("f32", "f16", "bf16", "fp8") else integers
            assert kernels.inner_activation(level, name, False) == expected, (level, name)
