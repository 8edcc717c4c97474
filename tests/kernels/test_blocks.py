"""Blocks that a decoder strings together: shared experts beside routed ones, and what a decoder refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_reference import packed, silu
from twofold import _testing
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.weights.weight_format import WeightMatrix

H, I = 40, 72  # noqa: E741


def matrices(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.standard_normal(s).astype(np.float32) / 8 for s in ((I, H), (I, H), (H, I))]


def feed_forward(pool: ops.ThreadPool, of: list[np.ndarray]) -> dict[str, ops.PackedMatrix]:
    """Arguments of a block for (gate, up, down)."""
    return {name: packed(pool, matrix) for name, matrix in zip(("gate", "up", "down"), of, strict=True)}


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
        shared = ops.SharedExperts(pool, **feed_forward(pool, [gate, up, down]), shared_gate=vector)
        got = hidden.copy()
        for t in range(0, 19, step):
            _testing.add_shared_experts(shared, got[t : t + step], normed[t : t + step].copy())
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
        dense = ops.DenseFfn(pool, norm_weight=norm, **feed_forward(pool, matrices(rng)), eps=1e-6)
        gate = rng.standard_normal((6, H)).astype(np.float32)
        router = ops.Router(
            pool, norm_weight=norm.copy(), gate_weight=gate, eps=1e-6, shape=ops.RouterShape(2)
        )
        shared = ops.SharedExperts(pool, **feed_forward(pool, matrices(rng)), shared_gate=norm.copy())
        return [dense, router, shared]

    hidden = rng.standard_normal((7, H)).astype(np.float32)
    expected = hidden.copy()
    dense, router, shared = blocks()
    assert isinstance(dense, ops.DenseFfn)
    assert isinstance(router, ops.Router)
    assert isinstance(shared, ops.SharedExperts)
    ops.Decoder([dense]).forward(expected, batch_of(7), ops.StateCache([[]], 1, 16))
    normed = np.empty_like(expected)
    _testing.route(router, expected, normed, np.empty((7, 2), np.int32), np.empty((7, 2), np.float32))
    _testing.add_shared_experts(shared, expected, normed)

    cache = ops.StateCache([[]], 1, 16)
    listed = blocks()
    decoder = ops.Decoder(listed)
    listed.clear()  # the decoder's own hold on them counts
    for _ in range(2):
        got = hidden.copy()
        decoder.forward(got, batch_of(7), cache, None)
        assert np.array_equal(got, expected)


def test_norms_after_blocks_read_the_blocks_sum_and_may_be_chained() -> None:
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
        first, second = (feed_forward(pool, of) for of in (weights, more))
        decoder = ops.Decoder(
            [
                ops.DenseFfn(pool, norm_weight=norms[0].copy(), **first, eps=1e-6),
                ops.PostNorm(pool, norm_weight=norms[1].copy(), eps=1e-6, over=1),
                ops.DenseFfn(pool, norm_weight=norms[2].copy(), **second, eps=1e-6),
                ops.PostNorm(pool, norm_weight=norms[3].copy(), eps=1e-6, over=3, scale=0.7),
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


def test_hyper_connections_join_blocks_with_several_streams() -> None:
    """A feed-forward and a router's shared expert, ended by a head or by the mean; threads and tokens at once do not
    show."""
    rng = np.random.default_rng(8)
    streams, eps, offset = 3, 1e-5, 0.01
    weights, more = matrices(rng), matrices(rng)
    norms = rng.uniform(0.5, 1.5, (2, H)).astype(np.float32)
    mixes = [rng.standard_normal((n * streams, streams * H), np.float32) * 0.1 for n in (2, 2, 1)]
    bases = [rng.standard_normal(len(mix), np.float32) for mix in mixes]
    scales = [rng.uniform(0.5, 1.5, n).astype(np.float32) for n in (2, 2, 1)]
    hidden = rng.standard_normal((19, H)).astype(np.float32)

    def shares(x: np.ndarray, n: int) -> np.ndarray:
        rows = x.reshape(len(x), -1)
        root = np.sqrt((rows.astype(np.float64) ** 2).mean(1, keepdims=True) + eps)
        logits = (rows @ mixes[n].T / root).reshape(len(x), -1, streams) * scales[n][:, None]
        return 1 / (1 + np.exp(-(logits + bases[n].reshape(-1, streams))))

    def dense(rows: np.ndarray, norm: np.ndarray, of: list[np.ndarray]) -> np.ndarray:
        gate, up, down = of
        x = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * norm
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    x = np.repeat(hidden[:, None], streams, 1).astype(np.float64)
    for n, of in enumerate((weights, more)):
        found = shares(x, n)
        output = dense(((found[:, 0] + offset)[:, :, None] * x).sum(1), norms[n], of)
        x = x + (1.7 * found[:, 1] + offset)[:, :, None] * output[:, None]
    ends = ((shares(x, 2)[:, 0] + offset)[:, :, None] * x).sum(1), x.mean(1)

    for has_head, expected in zip((True, False), ends, strict=True):
        results = []
        for threads, step in ((1, 19), (3, 19), (2, 1)):
            pool = ops.ThreadPool(threads)

            def mix(n: int, pool: ops.ThreadPool = pool) -> dict[str, Any]:
                packed = ops.PackedMatrix(pool, [WeightMatrix(mixes[n], "f32", streams * H)])
                known = {"base": bases[n].copy(), "scale": scales[n].copy(), "num_streams": streams}
                magnitude = {"magnitude": 1.7} if len(scales[n]) > 1 else {}
                return {"mix": packed, **known, "eps": eps, "offset": offset, **magnitude}

            first, second = (feed_forward(pool, of) for of in (weights, more))
            gate = np.ones((4, H), np.float32)
            decoder = ops.Decoder(
                [
                    ops.DenseFfn(pool, norm_weight=norms[0].copy(), **first, eps=1e-6),
                    ops.HyperConnection(pool, **mix(0), over=1),
                    ops.Router(
                        pool,
                        norm_weight=norms[1].copy(),
                        gate_weight=gate,
                        eps=1e-6,
                        shape=ops.RouterShape(2),
                    ),
                    ops.SharedExperts(pool, **second),
                    ops.HyperConnection(pool, **mix(1), over=2),
                    *([ops.StreamHead(pool, **mix(2))] if has_head else []),
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


def test_gates_of_streams_do_not_depend_on_the_tokens_at_once() -> None:
    """More tokens than have their gates computed together; what they compute, transformers judges in whole models."""
    rng, streams, rank = np.random.default_rng(10), 3, 7
    norms = rng.uniform(0.5, 1.5, (2, streams * H)).astype(np.float32)
    shapes = {"down": (rank, streams * H), "up": (streams * H, rank), "inject": (streams, streams * H)}
    drawn = {part: rng.standard_normal(shape, np.float32) for part, shape in shapes.items()}
    weights, norm = matrices(rng), np.ones(H, np.float32)
    hidden = rng.standard_normal((300, H)).astype(np.float32)
    results = []
    for threads, step in ((1, 300), (3, 300), (2, 7)):
        pool = ops.ThreadPool(threads)
        packed = {
            part: ops.PackedMatrix(pool, [WeightMatrix(each, "f32", each.shape[1])])
            for part, each in drawn.items()
        }
        given: dict[str, Any] = {"num_streams": streams, "eps": 1e-6}
        ends = {part: packed[part] for part in ("down", "up")}
        decoder = ops.Decoder(
            [
                ops.DenseFfn(pool, norm_weight=norm, **feed_forward(pool, weights), eps=1e-6),
                ops.HyperConnection(pool, norm=norms[0].copy(), **packed, **given, over=1),
                ops.StreamHead(pool, norm=norms[1].copy(), **ends, **given),
            ]
        )
        got = []
        for t in range(0, len(hidden), step):
            rows = hidden[t : t + step].copy()
            decoder.forward(rows, batch_of(len(rows)), ops.StateCache([[]], 2, 16), None)
            got.append(rows)
        results.append(np.concatenate(got))
    assert np.abs(results[0]).max() > 0.1
    assert all(np.array_equal(other, results[0]) for other in results[1:])


def test_blocks_beside_several_streams_are_refused() -> None:
    rng, pool = np.random.default_rng(9), ops.ThreadPool(1)
    dense = ops.DenseFfn(
        pool, norm_weight=np.ones(H, np.float32), **feed_forward(pool, matrices(rng)), eps=1e-6
    )
    norm = ops.PostNorm(pool, norm_weight=np.ones(H, np.float32), eps=1e-6, over=1)

    def joining(streams: int, over: int) -> ops.HyperConnection:
        matrix = np.zeros((2 * streams, streams * H), np.float32)
        return ops.HyperConnection(
            pool,
            mix=ops.PackedMatrix(pool, [WeightMatrix(matrix, "f32", streams * H)]),
            base=np.zeros(2 * streams, np.float32),
            scale=np.ones(2, np.float32),
            num_streams=streams,
            eps=1e-6,
            offset=0.0,
            magnitude=2.0,
            over=over,
        )

    two, three = joining(2, 1), joining(3, 1)
    ops.Decoder([dense, norm, joining(2, 2)])
    for blocks in ([dense, two, dense], [dense, two, dense, norm], [dense, two, dense, three]):
        with pytest.raises(KernelError, match="is not one that a Residual of its own joins with"):
            ops.Decoder(blocks)
    with pytest.raises(KernelError, match="HyperConnection: num_streams is 1"):
        joining(1, 1)


def test_refuses_what_does_not_fit() -> None:
    rng, pool = np.random.default_rng(6), ops.ThreadPool(1)
    weights = feed_forward(pool, matrices(rng))
    norm = np.ones(H, np.float32)
    dense = ops.DenseFfn(pool, norm_weight=norm, **weights, eps=1e-6)
    shared = ops.SharedExperts(pool, **weights)
    gate = np.ones((4, H), np.float32)
    router = ops.Router(pool, norm_weight=norm, gate_weight=gate, eps=1e-6, shape=ops.RouterShape(2))
    cache, hidden = ops.StateCache([[]], 1, 16), np.ones((3, H), np.float32)
    with pytest.raises(KernelError, match="no blocks were given"):
        ops.Decoder([])
    with pytest.raises(KernelError, match="None was given for a block"):
        ops.Decoder([dense, None])  # type: ignore[list-item]
    one, two = (ops.PostNorm(pool, norm_weight=norm, eps=1e-6, over=over) for over in (1, 2))
    for blocks, message in (
        ([one], "over 1 blocks; expected 1 to the 0 before it"),
        ([dense, two], "over 2 blocks; expected 1 to the 1 before it"),
        ([dense, dense, one, one], "takes a part of another's blocks"),
        ([dense, dense, two, two], "takes a part of another's blocks"),
    ):
        with pytest.raises(KernelError, match=message):
            ops.Decoder(blocks)
    with pytest.raises(KernelError, match="PostNorm: over is 0"):
        ops.PostNorm(pool, norm_weight=norm, eps=1e-6, over=0)
    with pytest.raises(KernelError, match="DenseFfn: activation"):
        ops.DenseFfn(pool, norm_weight=norm, **weights, eps=1e-6, activation="relu")
    with pytest.raises(KernelError, match=f"hidden size 41; the first has {H}"):
        ops.Decoder([dense, ops.RoutedExperts(41, 0)])
    with pytest.raises(KernelError, match="SharedExperts: no router of this step comes before it"):
        ops.Decoder([dense, shared]).forward(hidden, batch_of(3), cache, None)
    with pytest.raises(KernelError, match="RoutedExperts: the step has no experts"):
        ops.Decoder([router, ops.RoutedExperts(H, 0)]).forward(hidden, batch_of(3), cache, None)
    with pytest.raises(KernelError, match=r"SharedExperts: down is packed \(72, 40\)"):
        ops.SharedExperts(pool, **weights | {"down": weights["up"]})
    with pytest.raises(TypeError, match="DenseFfn: eps has the wrong type"):
        ops.DenseFfn(pool, norm_weight=norm, **weights, eps="small")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"DenseFfn\(\) misses the argument eps"):
        ops.DenseFfn(pool, norm_weight=norm, **weights)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"DenseFfn\(\) has no argument scale"):
        ops.DenseFfn(pool, norm_weight=norm, **weights, eps=1e-6, scale=1.0)  # type: ignore[call-arg]
