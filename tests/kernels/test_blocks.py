"""Blocks that a decoder strings together: shared experts beside routed ones, and what a decoder refuses."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import packed, silu
from twofold.api.errors import KernelError
from twofold.blocks import ops

H, I = 40, 72  # noqa: E741


def matrices(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.standard_normal(s).astype(np.float32) / 8 for s in ((I, H), (I, H), (H, I))]


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_add_a_feed_forward_of_the_normed_rows(gated: bool) -> None:
    rng = np.random.default_rng(3)
    gate, up, down = matrices(rng)
    vector = rng.standard_normal(H).astype(np.float32) if gated else None
    hidden, normed = rng.standard_normal((2, 19, H)).astype(np.float32)
    expected = (silu(normed.astype(np.float64) @ gate.T) * (normed @ up.T)) @ down.T
    if vector is not None:
        expected /= 1 + np.exp(-(normed.astype(np.float64) @ vector))[:, None]
    results = []
    for threads, step in ((1, 19), (3, 19), (2, 1), (1, 8)):
        pool = ops.ThreadPool(threads)
        shared = ops.SharedExperts(pool, *(packed(pool, m) for m in (gate, up, down)), vector)
        got = hidden.copy()
        for t in range(0, 19, step):
            shared.forward(got[t : t + step], normed[t : t + step].copy())
        results.append(got)
    np.testing.assert_allclose(results[0], hidden + expected, atol=2e-5)
    assert all(np.array_equal(other, results[0]) for other in results[1:])


def batch_of(num_tokens: int) -> ops.AttentionBatch:
    places = np.arange(num_tokens, dtype=np.int32)
    angles = np.zeros((num_tokens, 4), np.float32)
    return ops.AttentionBatch(
        places, np.zeros_like(places), np.arange(2, dtype=np.int32)[None], angles, angles
    )


def test_a_decoder_runs_blocks_of_any_kind_in_order_and_keeps_them() -> None:
    rng = np.random.default_rng(4)
    pool = ops.ThreadPool(2)
    norm = rng.uniform(0.5, 1.5, H).astype(np.float32)

    def blocks() -> list[ops.Block]:
        rng = np.random.default_rng(5)
        dense = ops.DenseFfn(pool, norm, *(packed(pool, m) for m in matrices(rng)), 1e-6)
        gate = rng.standard_normal((6, H)).astype(np.float32)
        router = ops.Router(pool, norm.copy(), gate, 1e-6, ops.RouterShape(2))
        shared = ops.SharedExperts(pool, *(packed(pool, m) for m in matrices(rng)), norm.copy())
        return [dense, router, shared]

    hidden = rng.standard_normal((7, H)).astype(np.float32)
    expected = hidden.copy()
    dense, router, shared = blocks()
    assert isinstance(dense, ops.DenseFfn)
    assert isinstance(router, ops.Router)
    assert isinstance(shared, ops.SharedExperts)
    dense.forward(expected)
    normed = np.empty_like(expected)
    router.forward(expected, normed, np.empty((7, 2), np.int32), np.empty((7, 2), np.float32))
    shared.forward(expected, normed)

    cache = ops.StateCache([[]], 1, 16)
    listed = blocks()
    decoder = ops.Decoder(listed)
    listed.clear()  # the decoder's own hold on them counts
    for _ in range(2):
        got = hidden.copy()
        decoder.forward(got, batch_of(7), cache, None)
        assert np.array_equal(got, expected)


def test_norms_behind_blocks_take_what_these_add_and_may_take_one_another() -> None:
    """A norm over a dense part and its norm, which then scales the stream; threads and tokens at once do not show."""
    rng = np.random.default_rng(7)
    weights, more = matrices(rng), matrices(rng)
    norms = rng.uniform(0.5, 1.5, (4, H)).astype(np.float32)
    hidden = rng.standard_normal((19, H)).astype(np.float32)

    def normed(rows: np.ndarray, norm: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * norm

    def dense(rows: np.ndarray, norm: np.ndarray, of: list[np.ndarray]) -> np.ndarray:
        gate, up, down = of
        x = normed(rows, norm)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    inner = normed(dense(hidden, norms[0], weights), norms[1]) + dense(hidden, norms[2], more)
    expected = (hidden + normed(inner, norms[3])) * 0.7
    results = []
    for threads, step in ((1, 19), (3, 19), (2, 1)):
        pool = ops.ThreadPool(threads)
        first, second = ([packed(pool, matrix) for matrix in of] for of in (weights, more))
        decoder = ops.Decoder(
            [
                ops.DenseFfn(pool, norms[0].copy(), *first, 1e-6),
                ops.PostNorm(pool, norms[1].copy(), 1e-6, 1),
                ops.DenseFfn(pool, norms[2].copy(), *second, 1e-6),
                ops.PostNorm(pool, norms[3].copy(), 1e-6, 3, 0.7),
            ]
        )
        got = hidden.copy()
        for t in range(0, 19, step):
            rows = got[t : t + step].copy()
            decoder.forward(rows, batch_of(len(rows)), ops.StateCache([[]], 2, 16), None)
            got[t : t + step] = rows
        results.append(got)
    np.testing.assert_allclose(results[0], expected, atol=2e-5)
    assert all(np.array_equal(other, results[0]) for other in results[1:])


def test_refuses_what_does_not_fit() -> None:
    rng, pool = np.random.default_rng(6), ops.ThreadPool(1)
    weights = [packed(pool, m) for m in matrices(rng)]
    norm = np.ones(H, np.float32)
    dense, shared = ops.DenseFfn(pool, norm, *weights, 1e-6), ops.SharedExperts(pool, *weights)
    router = ops.Router(pool, norm, np.ones((4, H), np.float32), 1e-6, ops.RouterShape(2))
    cache, hidden = ops.StateCache([[]], 1, 16), np.ones((3, H), np.float32)
    with pytest.raises(KernelError, match="no blocks were given"):
        ops.Decoder([])
    with pytest.raises(KernelError, match="None was given for a block"):
        ops.Decoder([dense, None])  # type: ignore[list-item]
    one, two = (ops.PostNorm(pool, norm, 1e-6, over) for over in (1, 2))
    for blocks, message in (
        ([one], "over 1 blocks; expected 1 to the 0 before it"),
        ([dense, two], "over 2 blocks; expected 1 to the 1 before it"),
        ([dense, dense, one, one], "takes a part of another's blocks"),
        ([dense, dense, two, two], "takes a part of another's blocks"),
    ):
        with pytest.raises(KernelError, match=message):
            ops.Decoder(blocks)
    with pytest.raises(KernelError, match="PostNorm: over is 0"):
        ops.PostNorm(pool, norm, 1e-6, 0)
    with pytest.raises(KernelError, match="DenseFfn: activation"):
        ops.DenseFfn(pool, norm, *weights, 1e-6, "relu")
    with pytest.raises(KernelError, match=f"hidden size 41; the first has {H}"):
        ops.Decoder([dense, ops.RoutedExperts(41, 0)])
    with pytest.raises(KernelError, match="SharedExperts: no router of this step comes before it"):
        ops.Decoder([dense, shared]).forward(hidden, batch_of(3), cache, None)
    with pytest.raises(KernelError, match="RoutedExperts: the step has no experts"):
        ops.Decoder([router, ops.RoutedExperts(H, 0)]).forward(hidden, batch_of(3), cache, None)
    with pytest.raises(KernelError, match=r"SharedExperts: down is packed \(72, 40\)"):
        ops.SharedExperts(pool, weights[0], weights[1], weights[1])
