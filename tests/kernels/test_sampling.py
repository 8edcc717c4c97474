"""Native picking against sorting, and log probabilities against float64, at every instruction-set level."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from twofold._testing import kernels
from twofold.api.errors import KernelError
from twofold.blocks import ops

from tests.kernels.sampling_reference import pick, pick_in_float64

INFINITY = np.float32(np.inf)
FILTERS = [
    (temperature, top_k, top_p, min_p)
    for temperature, top_k, (top_p, min_p) in itertools.product(
        (1e-320, 1e-4, 0.7, 1.0, 100.0),
        (0, 1, 7, 50, 10**9),
        ((1.0, 0.0), (1e-9, 0.0), (0.5, 0.0), (0.9, 0.05), (1.0, 1e-12), (1.0, 0.3), (0.999999, 1.0)),
    )
] + [(0.0, 0, 1.0, 0.0)]
UNIFORMS = (0.0, 0.013, 0.5, 0.77, 1.0 - 2.0**-53)


def rows() -> Iterator[tuple[str, np.ndarray]]:
    random = np.random.default_rng(3)
    for size in (1, 2, 33, 700, 5000):
        normal = random.standard_normal(size, np.float32)
        yield f"normal of {size}", normal * 3
        yield f"flat of {size}", np.full(size, -1.5, np.float32)
        yield f"few values of {size}", random.integers(-3, 3, size).astype(np.float32)
        masked = normal.copy()
        masked[random.random(size) < 0.6] = -INFINITY
        yield f"masked of {size}", masked
    wide = random.standard_normal(5000, np.float32)
    yield "huge", wide * 1e37
    yield "tiny", wide * np.float32(1e-38)
    yield "one peak", np.concatenate([wide, [np.float32(300.0)]]).astype(np.float32)
    yield "zeros of both signs", np.array([-0.0, 0.0, -0.0, -1.0], np.float32)
    yield "with NaN", np.array([np.nan, 1.0, np.nan, 2.0, -INFINITY, 2.0], np.float32)
    yield "with infinity", np.array([3.0, INFINITY, 1.0, INFINITY], np.float32)
    yield "nothing", np.array([-INFINITY, np.nan, -INFINITY], np.float32)


ROWS = dict(rows())


def picked(pool: ops.ThreadPool, logits: np.ndarray, draws: np.ndarray) -> list[int]:
    return ops.pick_tokens(pool, logits, draws, [None] * len(logits)).tolist()


@pytest.mark.parametrize("name", ROWS)
def test_tokens_are_those_of_sorting(name: str) -> None:
    logits = ROWS[name]
    draws = np.array([(*f, u) for f in FILTERS for u in UNIFORMS])
    found = picked(ops.ThreadPool(2), np.tile(logits, (len(draws), 1)), draws)
    expected = [pick(logits, t, int(k), p, m, u) for t, k, p, m, u in draws.tolist()]
    wrong = [(d, f, e) for d, f, e in zip(draws.tolist(), found, expected, strict=True) if f != e]
    assert not wrong, (len(wrong), wrong[:5])


def test_whole_numbers_pick_what_float64_picks() -> None:
    random = np.random.default_rng(8)
    logits = (random.standard_normal((60, 20_000), np.float32) * 2.5).round(2)
    cases = list(
        itertools.islice(itertools.cycle(f for f in FILTERS if f[0] in (0.7, 1.0, 100.0)), len(logits))
    )
    draws = np.array([(*f, u) for f, u in zip(cases, random.random(len(logits)), strict=True)])
    expected = [
        pick_in_float64(row, t, int(k), p, m, u)
        for row, (t, k, p, m, u) in zip(logits, draws.tolist(), strict=True)
    ]
    assert picked(ops.ThreadPool(1), logits, draws) == expected


def large_case() -> tuple[np.ndarray, np.ndarray]:
    """Rows long enough to be shared out, and how they are drawn."""
    random = np.random.default_rng(4)
    logits = random.standard_normal((7, 40_001), np.float32) * np.arange(1, 8, dtype=np.float32)[:, None]
    filters = [
        (1.0, 0, 1.0, 0.0),
        (1.0, 50, 0.9, 0.0),
        (2.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.02),
        (0.0, 0, 1.0, 0.0),
        (1.0, 2000, 1.0, 0.0),  # more than a row has blocks
        (1.0, 0, 0.9, 0.02),
    ]
    cases = list(itertools.islice(itertools.cycle(filters), len(logits)))
    return logits, np.array([(*f, u) for f, u in zip(cases, random.random(len(logits)), strict=True)])


def test_neither_threads_nor_batch_change_a_token() -> None:
    logits, draws = large_case()
    expected = [
        pick(row, t, int(k), p, m, u) for row, (t, k, p, m, u) in zip(logits, draws.tolist(), strict=True)
    ]
    for num_threads in (1, 2, 5, 16):
        pool = ops.ThreadPool(num_threads)
        assert picked(pool, logits, draws) == expected
        alone = [picked(pool, logits[i : i + 1], draws[i : i + 1])[0] for i in range(len(logits))]
        assert alone == expected


def digest() -> str:
    logits, draws = large_case()
    answers = ops.log_probabilities(ops.ThreadPool(1), logits, range(7), range(7), [5] * 7)
    return repr((picked(ops.ThreadPool(1), logits, draws), answers))


@pytest.mark.parametrize("level", kernels.supported_levels())
def test_every_level_gives_the_same_bits(level: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from tests.kernels.test_sampling import digest; print(digest())"],
        env={**os.environ, "TWOFOLD_ISA": level},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest()


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("nothing", "with infinity", "huge")])
def test_log_probabilities_and_the_likeliest(name: str) -> None:
    logits = ROWS[name]
    clean = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    with np.errstate(all="ignore"):
        total = clean.max() + np.log(np.exp(clean - clean.max()).sum()) if clean.max() > -np.inf else 0.0
    token = int(np.argmax(clean))
    order = [at for at in np.argsort(-clean, kind="stable") if not np.isnan(logits[at])]
    for count in (0, 1, 20):
        (answer,) = ops.log_probabilities(ops.ThreadPool(1), logits[None, :], [0], [token], [count])
        assert [t for t, _ in answer] == [token, *order[:count]]
        with np.errstate(all="ignore"):
            expected = clean[[token, *order[:count]]] - total
        assert np.allclose([v for _, v in answer], expected, rtol=1e-14, atol=1e-13)


def test_what_does_not_fit_is_refused() -> None:
    pool, logits = ops.ThreadPool(1), np.zeros((2, 5), np.float32)
    good = np.array([[1.0, 0, 1.0, 0, 0.5]] * 2)
    with pytest.raises(KernelError, match="expected float64 \\(rows, 5\\)"):
        ops.pick_tokens(pool, logits, good[:, :4], [None, None])
    with pytest.raises(KernelError, match="draws has 1 entries; expected 2"):
        ops.pick_tokens(pool, logits, good[:1], [None, None])
    with pytest.raises(KernelError, match="rules has 1 entries; expected 2"):
        ops.pick_tokens(pool, logits, good, [None])
    for column, value in ((0, -1.0), (0, np.nan), (2, 0.0), (3, 2.0), (4, 1.0)):
        bad = good.copy()
        bad[1, column] = value
        with pytest.raises(KernelError, match="row 1 of draws is out of range"):
            ops.pick_tokens(pool, logits, bad, [None, None])
    for rows, tokens, tops in (([2], [0], [0]), ([0], [5], [0]), ([0], [0], [-1])):
        with pytest.raises(KernelError, match="were asked of logits"):
            ops.log_probabilities(pool, logits, rows, tokens, tops)
