"""Activations as the packed kernels take them: against numpy, on every level, whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import ACTIVATIONS, F32, gated, silu, to_bf16_bits
from packed_reference import encode_q8, encode_q8_token, padded, split_q8, split_q8_token
from twofold._testing import kernels

from tests.kernels.kernel_levels import over

LEVELS = kernels.supported_levels()
COLUMNS = [1, 31, 32, 33, 64, 100, 256, 300, 768]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def activations(columns: int) -> F32:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((7, columns)) * 10.0 ** rng.integers(-6, 6, (7, 1))
    x[1] = 0
    x[2, rng.integers(columns)] = -5e30
    x[3] = np.float32(1e-36) * rng.standard_normal(columns)
    x[4] = np.rint(x[4] / 10) + 0.5  # halves are rounded to even
    x[4, ::32] = 127
    return x.astype(np.float32)


def parts_of(columns: int) -> list[int]:
    return [*range(32, columns, 64), columns]


@over("columns", COLUMNS)
def test_q8_rounds_to_nearest_even_of_amax_over_127(level: str, columns: int) -> None:
    x = activations(columns)
    for parts in (None, parts_of(columns)):
        rows = kernels.encode(x, "q8", level=level, parts=parts)
        for got, expected in zip(split_q8(rows, columns), encode_q8(x), strict=True):
            assert np.array_equal(got, expected)


@over("columns", COLUMNS)
def test_q8_token_rounds_a_row_by_one_scale(level: str, columns: int) -> None:
    x = activations(columns)
    x[5, 0], x[6, -1] = np.nan, np.inf
    rows = kernels.encode(x, "q8_token", level=level)
    for got, expected in zip(split_q8_token(rows, columns), encode_q8_token(x), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_run_with_no_number_in_it_becomes_nan_and_spares_its_neighbours(level: str, bad: float) -> None:
    x = activations(100)
    x[5, 40] = bad
    q, scale, sums = split_q8(kernels.encode(x, "q8", level=level), 100)
    expected_q, expected_scale, expected_sums = encode_q8(x)
    assert np.isnan(scale[5, 1])
    assert np.count_nonzero(np.isnan(scale)) == 1
    assert np.array_equal(scale, expected_scale, equal_nan=True)
    assert np.array_equal(q, expected_q)
    assert np.array_equal(sums, expected_sums)


@over("columns", COLUMNS)
def test_floats_are_followed_by_zeros(level: str, columns: int) -> None:
    x = activations(columns)
    x[6, 0] = np.nan
    x[6, -1] = 1e-40
    for parts in (None, parts_of(columns)):
        f32 = kernels.encode(x, "f32", level=level, parts=parts, stride=4 * padded(columns)).view(np.uint32)
        assert np.array_equal(f32[:, :columns], x.view(np.uint32))
        assert not f32[:, columns:].any()
        bf16 = kernels.encode(x, "bf16", level=level, parts=parts, stride=2 * padded(columns)).view(np.uint16)
        number = ~np.isnan(x)
        assert np.array_equal(bf16[:, :columns][number], to_bf16_bits(x)[number])
        assert np.isnan((bf16[:, :columns].astype(np.uint32) << 16).view(np.float32)[~number]).all()
        assert not bf16[:, columns:].any()


@over("n", [1, 7, 16, 32, 45])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [0.0, 2.5])
def test_gate_and_up_become_one(level: str, n: int, activation: str, limit: float) -> None:
    rng = np.random.default_rng(n)
    gate, up = (rng.standard_normal(n).astype(np.float32) * 6 for _ in range(2))
    expected = gated(activation, gate.astype(np.float64), up.astype(np.float64), limit)
    h = np.empty_like(gate)
    kernels.gated(gate, up, h, activation=activation, limit=limit, level=level)
    np.testing.assert_allclose(h, expected, rtol=2e-6, atol=2e-6)
    kernels.gated(gate, up, gate, activation=activation, limit=limit, level=level)
    assert np.array_equal(gate, h)


@pytest.mark.parametrize(
    ("activation", "limit"),
    [("swiglu_oai", 7.0), ("gelu_tanh", 0.0), ("silu", 16.0), ("silu_of_limited", 7.0)],
)
def test_far_ends_and_nan(level: str, activation: str, limit: float) -> None:
    ends = np.array([-1e30, -200, -40, 40, 200, 1e18], np.float32)
    gate, up = (part.ravel().copy() for part in np.meshgrid(ends, np.float32([-200, -3, 0, 5, 200])))
    h = np.empty_like(gate)
    kernels.gated(gate, up, h, activation=activation, limit=limit, level=level)
    with np.errstate(over="ignore"):
        expected = gated(activation, gate.astype(np.float64), up.astype(np.float64), limit)
    np.testing.assert_allclose(h, expected, rtol=1e-6, atol=1e-5)
    nan, one, found = (
        np.array([np.nan, 1], np.float32),
        np.array([1, np.nan], np.float32),
        np.empty(2, np.float32),
    )
    kernels.gated(nan, one, found, activation=activation, limit=limit, level=level)
    assert np.isnan(found).all()


def test_silu_is_exact_at_the_extremes_and_passes_nan(level: str) -> None:
    gate = np.array([-1e30, -200, -88, -20, -1, -1e-3, 0, 1e-3, 1, 20, 88, 200, 1e30, np.nan], np.float32)
    one, h = np.ones_like(gate), np.empty_like(gate)
    kernels.gated(gate, one, h, activation="silu", level=level)
    with np.errstate(over="ignore"):
        expected = silu(gate.astype(np.float64))
    assert np.isnan(h[-1])
    np.testing.assert_allclose(h[:-1], expected[:-1], rtol=5e-7, atol=1e-7)
