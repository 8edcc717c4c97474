"""One case table for all levels and formats: packed products against float64, themselves and each other."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import F32
from packed_reference import BLOCKS, FORMATS, Rows, decoded, filled, fitting_columns, random_rows
from twofold._testing import kernels

from tests.kernels.kernel_levels import over, own_kernels, runnable

# Rows of activations, rows of weights, columns (rounded up to the format's blocks).
SHAPES = [
    (1, 1, 1),
    (2, 31, 2),
    (3, 32, 33),
    (4, 33, 64),
    (5, 70, 100),
    (12, 64, 129),
    (13, 96, 300),
    (29, 40, 513),
    (70, 40, 300),
    (260, 33, 64),
]
KINDS = own_kernels(runnable(), FORMATS)
ALL_KINDS = pytest.mark.parametrize(("level", "name"), KINDS)
INTEGER_KINDS = pytest.mark.parametrize(("level", "name"), [kind for kind in KINDS if kind[1] in BLOCKS])
KINDS_AS_GENERIC = pytest.mark.parametrize(
    ("level", "name"),
    [
        (level, name)
        for level, name in KINDS
        if kernels.format_kernel(level, name)[0] == kernels.format_kernel("generic", name)[0]
    ],
)


def product(x: F32, rows: Rows, level: str, stride: int | None = None) -> F32:
    kind = kernels.format_kernel(level, rows.format)[0]
    y = np.full((len(x), len(rows.data)), np.nan, np.float32)
    encoded = kernels.encode(x, kind, level=level, stride=stride)
    kernels.packed_matmul(encoded, rows.packed(), rows.format, rows.columns, y, level=level)
    return y


def case(name: str, shape: tuple[int, int, int]) -> tuple[F32, Rows]:
    rng = np.random.default_rng(sum(shape))
    tokens, num_rows, columns = shape
    rows = random_rows(rng, name, num_rows, fitting_columns(name, columns))
    return rng.standard_normal((tokens, rows.columns)).astype(np.float32), rows


@ALL_KINDS
@over("shape", SHAPES)
def test_products_match_float64(level: str, name: str, shape: tuple[int, int, int]) -> None:
    x, rows = case(name, shape)
    kind = kernels.format_kernel(level, name)[0]
    seen = decoded(kernels.encode(x, kind, level=level), kind, rows.columns)
    w, y = rows.values().astype(np.float64), product(x, rows, level)
    # What the encoding made of x is known; the rest is float32 additions.
    assert (np.abs(y - seen @ w.T) <= 1e-6 * (np.abs(seen) @ np.abs(w).T) + 1e-30).all()
    # And the encoding keeps what it promises: half a step of 1/127 of a run's largest, or half a unit of bfloat16.
    if kind == "q8":
        runs = np.zeros((len(x), -(-rows.columns // 32) * 32))
        runs[:, : rows.columns] = np.abs(x)
        step = runs.reshape(len(x), -1, 32).max(-1).repeat(32, 1)[:, : rows.columns] / 254
    elif kind == "q8_token":
        step = np.abs(x).max(1, keepdims=True).repeat(rows.columns, 1) / 254
    else:
        step = np.abs(x) * {"f32": 0.0, "bf16": 2.0**-8}[kind]
    assert (np.abs(y - x @ w.T) <= (1.00001 * step + 1e-6 * np.abs(x)) @ np.abs(w).T + 1e-30).all()


@ALL_KINDS
def test_an_element_depends_on_its_own_rows_only(level: str, name: str) -> None:
    x, rows = case(name, (27, 166, 520))
    whole = product(x, rows, level)
    token = {m: product(x[m : m + 1], rows, level)[0] for m in (0, 13, 26)}
    for m, alone in token.items():
        assert np.array_equal(alone, whole[m])
    for begin, count in [(0, 2), (3, 3), (5, 4), (2, 7), (1, 12), (9, 13), (0, 25)]:
        assert np.array_equal(product(x[begin : begin + count], rows, level), whole[begin : begin + count])
    for begin, end in [(0, 1), (0, 33), (128, 129), (128, 166)]:
        part = rows.part(begin, end)
        assert np.array_equal(product(x[:5], part, level), whole[:5, begin:end])
    kind = kernels.format_kernel(level, name)[0]
    separate = kernels.encode(x, kind, level=level).shape[1] + 192
    assert np.array_equal(product(x, rows, level, stride=separate), whole)


@KINDS_AS_GENERIC
def test_levels_with_the_same_encoding_are_bit_identical(level: str, name: str) -> None:
    for shape in [(1, 40, 700), (3, 33, 300), (14, 32, 1030), (52, 33, 300)]:
        x, rows = case(name, shape)
        assert np.array_equal(product(x, rows, level), product(x, rows, "generic"))


@ALL_KINDS
def test_nothing_to_do_leaves_everything_alone(level: str, name: str) -> None:
    x, rows = case(name, (2, 3, 256))
    assert product(x[:0], rows, level).shape == (0, 3)
    assert product(x, rows.part(0, 0), level).shape == (2, 0)


@INTEGER_KINDS
def test_extreme_weights_and_activations(level: str, name: str) -> None:
    """Codes at both ends against activations at both ends: no sum of integers may saturate or wrap."""
    columns = 512
    rows = filled(random_rows(np.random.default_rng(0), name, 4, columns), [0x00, 0xFF, 0x80, 0x7F])
    x = np.ones((3, columns), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    kind = kernels.format_kernel(level, name)[0]
    seen = decoded(kernels.encode(x, kind, level=level), kind, columns)
    w = rows.values().astype(np.float64)
    assert (np.abs(product(x, rows, level) - seen @ w.T) <= 1e-6 * (np.abs(seen) @ np.abs(w).T)).all()
