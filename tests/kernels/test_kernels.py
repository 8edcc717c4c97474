"""One case table for every instruction-set level this CPU has, against float64, and each level against itself."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import F32, rmsnorm, rotate, to_bf16_bits, weights, widen
from numpy.typing import NDArray
from twofold._testing import kernels
from twofold.api.errors import ConfigError, KernelError

from tests.kernels.kernel_levels import over

LEVELS = kernels.supported_levels()
DTYPES = ["float32", "bfloat16", "int8", "fp8"]
# Reduction lengths around the vector widths, with and without a rest.
LENGTHS = [1, 3, 8, 15, 16, 17, 31, 48, 100, 257]
ROWS = [1, 2, 3, 4, 5, 9, 33, 66]
TOKENS = [1, 2, 3, 5, 6, 7, 13, 40, 49, 100]


def matmul(x: F32, w: NDArray, level: str) -> F32:
    y = np.full((len(x), len(w)), np.nan, np.float32)
    kernels.matmul(x, w, y, level=level)
    return y


def size(w: NDArray) -> float:
    """Approximate size of a product with a row of `w`; at least 1."""
    return max(1.0, float(np.sqrt((widen(w) ** 2).sum(axis=1)).max(initial=0.0)))


def test_some_level_is_better_than_scalar_where_the_cpu_is() -> None:
    assert LEVELS[0] == "generic"
    assert set(LEVELS) <= set(kernels.levels())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@over("length", LENGTHS)
def test_products_match_float64(level: str, dtype: str, length: int) -> None:
    rng = np.random.default_rng(length)
    for num_rows, num_tokens in zip(ROWS, reversed(TOKENS[: len(ROWS)]), strict=True):
        x = rng.standard_normal((num_tokens, length)).astype(np.float32)
        w = weights(rng, (num_rows, length), dtype)
        product = x.astype(np.float64) @ widen(w).T
        np.testing.assert_allclose(matmul(x, w, level), product, atol=2e-6 * size(w), rtol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@over("length", [17, 64, 100])
def test_an_element_depends_on_its_own_row_and_column_only(level: str, dtype: str, length: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((TOKENS[-1], length)).astype(np.float32)
    w = weights(rng, (ROWS[-1], length), dtype)
    product = matmul(x, w, level)
    for num_tokens in TOKENS:
        for begin, end in [(0, 1), (1, 4), (2, 9), (7, 40), (0, ROWS[-1])]:
            first = (num_tokens * 7) % (TOKENS[-1] - num_tokens + 1)
            rows = np.ascontiguousarray(x[first : first + num_tokens])
            part = np.s_[first : first + num_tokens, begin:end]
            assert np.array_equal(matmul(rows, w[begin:end], level), product[part])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@over("length", [4097, 8200, 16385, 40_003])
def test_rows_too_long_to_pack_change_no_bit(level: str, dtype: str, length: int) -> None:
    """Tiles shrink as rows grow, down to a single row that is read where it is."""
    rng = np.random.default_rng(length)
    x, w = rng.standard_normal((5, length)).astype(np.float32), weights(rng, (6, length), dtype)
    product = matmul(x, w, level)
    np.testing.assert_allclose(product, x.astype(np.float64) @ widen(w).T, atol=1e-5 * size(w))
    for t in range(5):
        assert np.array_equal(matmul(x[t : t + 1].copy(), w, level)[0], product[t])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_do_leaves_everything_alone(level: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    assert matmul(np.empty((0, 7), np.float32), weights(rng, (3, 7), dtype), level).shape == (0, 3)
    assert matmul(np.ones((2, 7), np.float32), weights(rng, (3, 7), dtype)[:0], level).shape == (2, 0)
    no_columns = matmul(np.ones((2, 0), np.float32), np.empty((3, 0), np.float32), level)
    assert np.array_equal(no_columns, np.zeros((2, 3)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@over("width", [1, 7, 16, 24, 64, 100, 128])
def test_weighted_sum(level: str, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    for num_rows in (1, 3, 4, 11):
        for num_positions in (1, 2, 16):
            p = rng.random((num_rows, num_positions)).astype(np.float32)
            v = weights(rng, (num_positions, width), dtype)
            out = rng.standard_normal((num_rows, width)).astype(np.float32)
            expected = out + p.astype(np.float64) @ widen(v)
            alone = out[-1:].copy()
            kernels.weighted_sum(p, v, out, level=level)
            np.testing.assert_allclose(out, expected, atol=1e-5 * size(v), rtol=1e-6)
            for j in range(num_positions):  # one position at a time, one row at a time: the same bits
                kernels.weighted_sum(p[-1:, j : j + 1].copy(), v[j : j + 1], alone, level=level)
            assert np.array_equal(alone, out[-1:])


@pytest.mark.parametrize("level", LEVELS)
@over("n", [1, 5, 16, 63, 64, 100, 256, 1000])
def test_row_kernels(level: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal(n).astype(np.float32), rng.uniform(0.5, 2, n).astype(np.float32)
    y = np.empty_like(x)
    kernels.rmsnorm(x, w, 1e-5, y, level=level)
    np.testing.assert_allclose(y, rmsnorm(x, w, 1e-5), rtol=1e-6, atol=1e-7)
    in_place = x.copy()
    kernels.rmsnorm(in_place, w, 1e-5, in_place, level=level)
    assert np.array_equal(in_place, y)

    kernels.axpy(0.25, x, y, level=level)
    np.testing.assert_allclose(y, rmsnorm(x, w, 1e-5) + 0.25 * x.astype(np.float64), rtol=1e-6, atol=1e-6)

    rows, weights = np.stack([x, -x, x[::-1]]), np.array([0.5, -2, 1], np.float32)
    expected = weights @ rows.astype(np.float64).clip(min=0)
    np.testing.assert_allclose(kernels.relu_sum(rows, weights, level=level), expected, rtol=1e-6, atol=1e-6)

    scores = (20 * x).copy()
    peak, total = kernels.softmax_exp(scores, 0.5, level=level)
    scaled = (20 * x).astype(np.float64) * 0.5
    assert peak == pytest.approx(scaled.max())
    np.testing.assert_allclose(scores, np.exp(scaled - scaled.max()), rtol=1e-5, atol=1e-37)
    assert total == pytest.approx(scores.astype(np.float64).sum(), rel=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@over("half", [1, 4, 8, 12, 16, 20, 64])
def test_rope_rotates_pairs_and_copies_the_rest(level: str, half: int) -> None:
    rng = np.random.default_rng(half)
    v = rng.standard_normal(2 * half + 3).astype(np.float32)
    angle = rng.uniform(-3, 3, half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    expected = rotate(v.astype(np.float64), cos, sin)
    rest = v[2 * half :].copy()
    kernels.rope(v, cos, sin, level=level)
    np.testing.assert_allclose(v, expected, atol=1e-6)
    assert np.array_equal(v[2 * half :], rest)


@pytest.mark.parametrize("level", LEVELS)
def test_softmax_of_one_and_of_equals(level: str) -> None:
    one = np.array([-1e30], np.float32)
    assert kernels.softmax_exp(one, 1.0, level=level) == (np.float32(-1e30), 1.0)
    same = np.full(33, 7.5, np.float32)
    assert kernels.softmax_exp(same, 0.1, level=level) == (0.75, 33.0)
    assert np.array_equal(same, np.ones(33))


@pytest.mark.parametrize("level", LEVELS)
def test_bf16_rounds_to_nearest_even_and_keeps_nan(level: str) -> None:
    rng = np.random.default_rng(2)
    special = [0.0, -0.0, 1.0, np.inf, -np.inf, 3.3895314e38, 1e-45, 1.00390625, 1.01171875]
    x = np.concatenate([np.array(special, np.float32), rng.standard_normal(1000).astype(np.float32)])
    bits = kernels.f32_to_bf16(x, level=level)
    assert np.array_equal(bits, to_bf16_bits(x))
    assert np.array_equal(kernels.bf16_to_f32(bits, level=level), widen(bits).astype(np.float32))
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(kernels.bf16_to_f32(kernels.f32_to_bf16(nan, level=level), level=level)).all()


@pytest.mark.parametrize("level", LEVELS)
@over("n", [1, 16, 37, 128])
def test_rows_of_a_cache_are_rounded_to_nearest_even(level: str, n: int) -> None:
    import torch

    rng = np.random.default_rng(n)
    for scale in (1e-30, 2.0**-9, 1.0, 300.0):
        x = (scale * rng.standard_normal(n)).astype(np.float32)
        codes, step = kernels.f32_to_i8(x, level=level)
        assert step == pytest.approx(np.abs(x).max() / 127)
        assert np.abs(codes * np.float64(step) - x).max() <= 0.5001 * step
        bits = kernels.f32_to_fp8(x, level=level)
        expected = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(bits, expected)
    assert kernels.f32_to_i8(np.zeros(n, np.float32), level=level)[1] == 0.0
    ties = np.array([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 449, np.inf, -np.inf, 464, -0.0], np.float32)
    bits = kernels.f32_to_fp8(ties, level=level)
    assert bits.tolist() == [0x38, 0x3A, 0, 2, 0x7E, 0x7E, 0xFE, 0x7E, 0x80]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_is_exact(level: str, dtype: str) -> None:
    if dtype == "float32":
        return
    x = weights(np.random.default_rng(1), (5, 77), dtype)
    assert np.array_equal(kernels.widen(x, level=level), widen(x).astype(np.float32))


@pytest.mark.parametrize("level", LEVELS)
def test_exp_is_exact_to_two_units_in_the_last_place(level: str) -> None:
    x = np.linspace(-87, 0, 200_001).astype(np.float32)
    got = x.copy()
    kernels.softmax_exp(got, 1.0, level=level)  # the maximum is 0: what remains is exp
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.abs((got - exact) / ulp).max() <= 2.0


def test_unknown_levels_and_wrong_shapes_are_refused() -> None:
    x, w, y = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32), np.empty((2, 3), np.float32)
    with pytest.raises(ConfigError, match='level "sse9" does not exist'):
        kernels.matmul(x, w, y, level="sse9")
    with pytest.raises(KernelError, match=r"kernels.matmul: w is float32 \(3, 4\); expected .* \(any, 5\)"):
        kernels.matmul(np.ones((2, 5), np.float32), w, y, level="generic")
    with pytest.raises(KernelError, match="y is float32"):
        kernels.matmul(x, w, np.empty((3, 2), np.float32), level="generic")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_bytes", [0, 1, 511, 4096, 5003])
def test_read_all_reads_all(level: str, num_bytes: int) -> None:
    memory = np.random.default_rng(8).integers(0, 256, num_bytes, np.uint8)
    before = kernels.read_all(memory, level=level)
    assert before == kernels.read_all(memory, level=level)
    for at in range(0, num_bytes, max(1, num_bytes // 97)):
        memory[at] ^= 1
        assert kernels.read_all(memory, level=level) != before
        memory[at] ^= 1
