"""Products of 8-bit activations with integer weights: every level against the scalar one, bit for bit.

The scalar level is tested against float64 in test_packed_matmul.py; here are the shapes at which tiles, chunks, strips
and slabs of the vector kernels begin and end.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import F32
from packed_reference import BLOCKS, Rows, filled, fitting_columns, random_rows, scale_bytes
from twofold._testing import kernels

from tests.kernels.kernel_levels import over, own_kernels

LEVELS = kernels.supported_levels()
CASES = pytest.mark.parametrize(("level", "name"), own_kernels(LEVELS[1:], BLOCKS))


def product(x: F32, rows: Rows, level: str) -> F32:
    y = np.full((len(x), len(rows.data)), np.nan, np.float32)
    encoded = kernels.encode(x, kernels.format_kernel(level, rows.format)[0], level="generic")
    kernels.packed_matmul(encoded, rows.packed(), rows.format, rows.columns, y, level=level)
    return y


def activations(rng: np.random.Generator, tokens: int, columns: int) -> F32:
    """Runs of very different sizes, some of them zero."""
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    for begin in range(0, columns, 32):
        x[:, begin : begin + 32] *= 10.0 ** rng.integers(-3, 3, (tokens, 1))
    x[:, 32 : 32 * rng.integers(1, 3)] = 0
    return x


def assert_same_bits(a: F32, b: F32) -> None:
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


@CASES
@over("tokens", [*range(1, 14), 25, 33, 48, 49, 97])
def test_any_number_of_tokens(level: str, name: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    num_rows = [1, 33, 70, 97][tokens % 4]
    columns = fitting_columns(name, [32, 100, 300, 520][tokens % 3])
    x, rows = activations(rng, tokens, columns), random_rows(rng, name, num_rows, columns)
    assert_same_bits(product(x, rows, level), product(x, rows, "generic"))


@CASES
@over("columns", [1, 33, 65, 129, 257, 480, 801, 1300])
def test_any_number_of_columns(level: str, name: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = activations(rng, 8, fitting_columns(name, columns))
    rows = random_rows(rng, name, 31, x.shape[1])
    assert_same_bits(product(x, rows, level), product(x, rows, "generic"))


@CASES
@pytest.mark.parametrize("num_rows", [2, 66])
def test_more_tokens_and_columns_than_are_held_at_once(level: str, name: str, num_rows: int) -> None:
    """Sums pass through y between slabs of columns; every strip of tokens reads the weights again."""
    rng = np.random.default_rng(7)
    columns = 5120
    x, rows = activations(rng, 200, columns), random_rows(rng, name, num_rows, columns)
    y = product(x, rows, level)
    some = [0, 1, 50, 191, 192, 199]
    assert_same_bits(y[some], product(x[some], rows, "generic"))
    for begin in (0, 60, 190):
        assert_same_bits(product(x[begin : begin + 10].copy(), rows, level), y[begin : begin + 10])


@CASES
def test_codes_and_activations_at_their_ends(level: str, name: str) -> None:
    """Every byte of the codes the same, so that sums are as large as they can be, in both directions."""
    columns, fills = 512, [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F]
    rows = random_rows(np.random.default_rng(0), name, len(fills), columns)
    full = filled(rows, fills)
    x = np.ones((5, columns), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 16:32] = -1
    x[4] = 0
    y = product(x, full, level)
    assert_same_bits(y, product(x, full, "generic"))
    assert not y[4].any()
    if BLOCKS[name].exponent:  # no power of two is zero
        return
    nothing = full.data.copy()
    nothing[:, scale_bytes(full)] = 0
    assert not product(x, Rows(name, columns, nothing), level).any()


@pytest.mark.parametrize("level", LEVELS)
def test_every_exponent_of_mxfp4(level: str) -> None:
    rng = np.random.default_rng(5)
    rows = random_rows(rng, "mxfp4", 256, 64)
    rows.data[:, ::17] = np.arange(256, dtype=np.uint8)[:, None]
    x = rng.standard_normal((3, 64)).astype(np.float32) * np.float32(1e-3)
    y, expected = product(x, rows, level)[:, :230], product(x, rows, "generic")[:, :230]  # beyond, floats end
    assert np.isfinite(y).all()
    assert_same_bits(y, expected)
    plain = rows.data.copy()
    plain[:, ::17] = 127
    powers = np.exp2(np.arange(20, 230, dtype=np.float64) - 127)
    ones = product(x, Rows("mxfp4", 64, plain), "generic")[:, 20:230]
    np.testing.assert_array_equal(y[:, 20:], (ones * powers).astype(np.float32))


@CASES
def test_a_token_that_is_not_a_number_spares_its_neighbours(level: str, name: str) -> None:
    rng = np.random.default_rng(3)
    columns = fitting_columns(name, 320)
    x, rows = activations(rng, 9, columns), random_rows(rng, name, 40, columns)
    expected = product(x, rows, level).copy()
    x[4, 100] = np.nan
    y = product(x, rows, level)
    assert np.isnan(y[4]).all()
    others = [m for m in range(9) if m != 4]
    assert_same_bits(y[others], expected[others])
