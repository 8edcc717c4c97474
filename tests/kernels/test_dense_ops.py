"""Router, dense feed-forward, LM head and embedding against float64 and torch, whole and cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_reference import F32, packed, rmsnorm, rounding, silu, to_bf16_bits, weights, widen
from numpy.typing import NDArray
from packed_reference import FORMATS, fitting_columns, random_rows
from twofold import _testing
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.weights.weight_format import WeightMatrix

from tests.tiny_models.writing import weight_matrix

EPS = 1e-5
DTYPES = ["float32", "bfloat16"]


def rows(rng: np.random.Generator, count: int, width: int) -> F32:
    return rng.standard_normal((count, width)).astype(np.float32)


def route(
    router: ops.Router, hidden: F32, top_k: int, experts: int
) -> tuple[F32, NDArray[np.int32], F32, F32]:
    count = len(hidden)
    normed, logits = np.empty_like(hidden), np.empty((count, experts), np.float32)
    ids, shares = np.empty((count, top_k), np.int32), np.empty((count, top_k), np.float32)
    _testing.route(router, hidden, normed, ids, shares, logits)
    return normed, ids, shares, logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (5, 5), (60, 1), (128, 8)])
@pytest.mark.parametrize("normalise", [True, False])
def test_router_picks_as_torch_does(dtype: str, experts: int, top_k: int, normalise: bool) -> None:
    rng = np.random.default_rng(experts)
    norm, gate = rng.uniform(0.5, 1.5, 40).astype(np.float32), weights(rng, (experts, 40), dtype)
    hidden = rows(rng, 50, 40)
    router = ops.Router(
        ops.ThreadPool(2),
        norm_weight=norm,
        gate_weight=gate,
        eps=EPS,
        shape=ops.RouterShape(top_k, renormalise=normalise),
    )
    before = hidden.copy()
    normed, ids, shares, logits = route(router, hidden, top_k, experts)
    assert np.array_equal(hidden, before)
    np.testing.assert_allclose(normed, rmsnorm(hidden, norm, EPS), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(logits, normed.astype(np.float64) @ widen(gate).T, atol=1e-5)
    probabilities = torch.softmax(torch.from_numpy(logits), -1)
    top, index = torch.topk(probabilities, top_k, dim=-1)
    if normalise:
        top = top / top.sum(-1, keepdim=True)
    assert np.array_equal(ids, index.numpy())
    np.testing.assert_allclose(shares, top.numpy(), rtol=1e-5)
    # Without logits, and one row at a time: the same.
    for t in range(0, 50, 7):
        alone = route(router, hidden[t : t + 1].copy(), top_k, experts)
        assert all(
            np.array_equal(a[0], b[t]) for a, b in zip(alone, (normed, ids, shares, logits), strict=True)
        )


def test_router_prefers_the_lower_expert_among_equals_and_survives_nan() -> None:
    gate = np.zeros((6, 4), np.float32)
    router = ops.Router(
        ops.ThreadPool(1),
        norm_weight=np.ones(4, np.float32),
        gate_weight=gate,
        eps=EPS,
        shape=ops.RouterShape(3, renormalise=True),
    )
    _, ids, shares, _ = route(router, np.ones((1, 4), np.float32), 3, 6)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    _, ids, shares, _ = route(router, np.full((1, 4), np.nan, np.float32), 3, 6)
    assert ids.min() >= 0
    assert ids.max() < 6
    assert np.isnan(shares).any()


def decoder_of(pool: ops.ThreadPool, norm: F32, gate: F32, up: F32, down: F32) -> ops.Decoder:
    """A dense feed-forward alone."""
    gate_of, up_of, down_of = (packed(pool, matrix) for matrix in (gate, up, down))
    return ops.Decoder([ops.DenseFfn(pool, norm_weight=norm, gate=gate_of, up=up_of, down=down_of, eps=EPS)])


def batch_of(num_tokens: int) -> ops.AttentionBatch:
    places, angles = np.arange(num_tokens, dtype=np.int32), np.zeros((num_tokens, 4), np.float32)
    return ops.AttentionBatch(
        places, np.zeros_like(places), np.arange(2, dtype=np.int32)[None], angles, angles
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_ffn_adds_to_hidden(dtype: str) -> None:
    rng = np.random.default_rng(3)
    norm = rng.uniform(0.5, 1.5, 48).astype(np.float32)
    gate, up, down = (weights(rng, shape, dtype) for shape in ((100, 48), (100, 48), (48, 100)))
    hidden = rows(rng, 21, 48)
    normed = rmsnorm(hidden, norm, EPS)
    expected = hidden + (silu(normed @ widen(gate).T) * (normed @ widen(up).T)) @ widen(down).T
    results = []
    for threads, step in ((1, 21), (3, 21), (2, 1), (1, 8)):
        pool = ops.ThreadPool(threads)
        ffn = decoder_of(pool, norm, gate, up, down)
        got = hidden.copy()
        for t in range(0, 21, step):
            part = got[t : t + step].copy()
            ffn.forward(part, batch_of(len(part)), ops.StateCache([[]], 2, 16))
            got[t : t + step] = part
        results.append(got)
    np.testing.assert_allclose(results[0], expected, atol=1e-5 + 4 * rounding(dtype))
    assert all(np.array_equal(other, results[0]) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head(dtype: str) -> None:
    rng = np.random.default_rng(4)
    norm, weight = rng.uniform(0.5, 1.5, 64).astype(np.float32), weights(rng, (5001, 64), dtype)
    hidden = rows(rng, 9, 64)
    expected = rmsnorm(hidden, norm, EPS) @ widen(weight).T
    whole = np.empty((9, 5001), np.float32)
    pool = ops.ThreadPool(3)
    ops.LmHead(pool, norm, packed(pool, weight), EPS).forward(hidden, whole)
    np.testing.assert_allclose(whole, expected, atol=2e-5 + 4 * rounding(dtype))
    one = np.empty((1, 5001), np.float32)
    head = ops.LmHead(pool, norm, packed(ops.ThreadPool(1), weight), EPS)
    for t in range(9):
        head.forward(hidden[t : t + 1], one)
        assert np.array_equal(one[0], whole[t])


def test_embed() -> None:
    rng = np.random.default_rng(5)
    table = rows(rng, 30, 17)
    ids = np.array([3, 29, 0, 3], np.int32)
    out = np.empty((4, 17), np.float32)
    pool = ops.ThreadPool(2)
    ops.embed(pool, weight_matrix(table), ids, out)
    assert np.array_equal(out, table[ids])
    ops.embed(pool, weight_matrix(to_bf16_bits(table)), ids, out)
    assert np.array_equal(out, widen(to_bf16_bits(table)[ids]).astype(np.float32))
    for wrong in (-1, 30):
        with pytest.raises(KernelError, match=f"token id {wrong} at row 1 is outside the vocabulary of 30"):
            ops.embed(pool, weight_matrix(table), np.array([0, wrong], np.int32), out[:2])


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_embed_reads_rows_of_every_format_where_they_lie(format_name: str) -> None:
    """Rows are a strided view, as those of a stack of matrices are; fp8's second block of rows has its own scales."""
    rng = np.random.default_rng(7)
    source = random_rows(rng, format_name, 300, fitting_columns(format_name, 320))
    matrix = source.matrix()
    wide = np.zeros((300, 2 * matrix.data.shape[1]), matrix.data.dtype)
    wide[:, : matrix.data.shape[1]] = matrix.data
    strided = WeightMatrix(wide[:, : matrix.data.shape[1]], format_name, source.columns, source.scales)
    ids = np.array([299, 0, 130, 131, 7], np.int32)
    out = np.empty((5, source.columns), np.float32)
    ops.embed(ops.ThreadPool(2), strided, ids, out)
    np.testing.assert_array_equal(out, source.values()[ids])
    np.testing.assert_array_equal(ops.dequantise(ops.ThreadPool(2), strided), source.values())


def test_refuses_what_does_not_fit() -> None:
    pool, norm = ops.ThreadPool(1), np.ones(8, np.float32)
    plain = np.ones((12, 8), np.float32)
    gate, down = packed(pool, plain), packed(pool, plain.T.copy())
    with pytest.raises(KernelError, match=r"DenseFfn: down is packed \(12, 8\); expected \(8, 12\)"):
        ops.DenseFfn(pool, norm_weight=norm, gate=gate, up=gate, down=gate, eps=EPS)
    stacked = packed(pool, plain[:5], plain[5:])
    with pytest.raises(KernelError, match="DenseFfn: a matrix is stacked"):
        ops.DenseFfn(pool, norm_weight=norm, gate=stacked, up=gate, down=down, eps=EPS)
    with pytest.raises(KernelError, match=r"norm_weight is float64 \(8,\)"):
        ops.LmHead(pool, norm.astype(np.float64), gate, EPS)
    with pytest.raises(KernelError, match="no parts were given"):
        ops.PackedMatrix(pool, [])
    with pytest.raises(KernelError, match=r"a part is 8 x 12; expected at least one row of 8 columns"):
        packed(pool, plain, plain.T.copy())
    with pytest.raises(KernelError, match="part 0 is a ndarray; expected a WeightMatrix"):
        ops.PackedMatrix(pool, [plain])
    with pytest.raises(KernelError, match="top_k is 13; expected 1 to the number of experts, 12"):
        ops.Router(pool, norm_weight=norm, gate_weight=plain, eps=EPS, shape=ops.RouterShape(13))
    with pytest.raises(KernelError, match='score is "tanh"'):
        ops.RouterShape(2, score="tanh")
    head = ops.LmHead(pool, norm, gate, EPS)
    with pytest.raises(KernelError, match=r"logits is float32 \(1, 11\); expected float32 \(1, 12\)"):
        head.forward(np.ones((1, 8), np.float32), np.empty((1, 11), np.float32))
    with pytest.raises(TypeError):
        head.forward([[1.0] * 8], np.empty((1, 12), np.float32))


def test_weights_outlive_their_names() -> None:
    """Operations keep what they were made of."""
    rng = np.random.default_rng(6)
    hidden, out = rows(rng, 1, 256), np.empty((1, 1000), np.float32)
    pool = ops.ThreadPool(2)
    head = ops.LmHead(pool, np.ones(256, np.float32), packed(pool, weights(rng, (1000, 256), "float32")), EPS)
    head.forward(hidden, out)
    first = out.copy()
    _litter = [np.full((1000, 256), 7.0, np.float32) for _ in range(4)]
    head.forward(hidden, out)
    assert np.array_equal(out, first)
