"""How a router is composed: score, bias for choosing, groups, renormalising, scale; against the scalar reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_reference import F32
from numpy.typing import NDArray
from router_reference import Shape, route
from twofold import _testing
from twofold.api.errors import KernelError
from twofold.blocks import ops

I32 = NDArray[np.int32]
HIDDEN = 24

CASES = [
    Shape(4),
    Shape(4, renormalise=True, scale=2.5),
    Shape(6, scale=16.0, num_groups=8, top_groups=3),  # DeepSeek-V2
    Shape(8, "sigmoid", True, 2.5, 8, 4, "top_two_sum"),  # DeepSeek-V3
    Shape(8, "sigmoid", True),
    Shape(
        12, "sigmoid", True, 2.5, 8, 2, "top_two_sum", zero_others=True
    ),  # A.X-K2: most biased scores are below 0
    Shape(3, "sigmoid", False, 0.5, 4, 1, "top_two_sum"),
    Shape(6, "sqrt_softplus", True, 1.5),
    Shape(2, "sqrt_softplus", False, 1.0, 2, 1, "max"),
    Shape(4, "softmax_of_chosen"),
    Shape(4, "softmax_of_chosen", True, 0.25, 4, 2, "max"),
    Shape(1, "softmax_of_chosen"),
    Shape(4, num_groups=64, top_groups=5, group_score="top_two_sum"),  # groups of one
    Shape(64),
]


def computed(
    shape: Shape, hidden: F32, gate: F32, bias: F32 | None, gate_bias: F32 | None = None
) -> tuple[I32, F32, F32]:
    """ids, weights and logits of the native router."""
    router = ops.Router(
        ops.ThreadPool(2),
        norm_weight=np.ones(HIDDEN, np.float32),
        gate_weight=gate,
        eps=1e-6,
        shape=ops.RouterShape(shape.top_k, **shape.options()),
        bias=bias,
        gate_bias=gate_bias,
    )
    count = len(hidden)
    ids = np.empty((count, shape.top_k), np.int32)
    weights, logits = np.empty((count, shape.top_k), np.float32), np.empty((count, len(gate)), np.float32)
    _testing.route(router, hidden, np.empty_like(hidden), ids, weights, logits)
    return ids, weights, logits


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_the_reference(shape: Shape, biased: bool) -> None:
    rng = np.random.default_rng(5)
    gate = rng.standard_normal((64, HIDDEN), np.float32)
    bias = rng.normal(-0.6 * shape.zero_others, 0.3, 64).astype(np.float32) if biased else None
    hidden = rng.standard_normal((40, HIDDEN), np.float32)
    ids, weights, logits = computed(shape, hidden, gate, bias)
    expected = [route(row.tolist(), shape, bias) for row in logits]
    assert ids.tolist() == [chosen for chosen, _ in expected]
    np.testing.assert_allclose(weights, [share for _, share in expected], rtol=3e-6)
    # Each token by itself, bit for bit.
    for t in (0, 17, 39):
        alone = computed(shape, hidden[t : t + 1].copy(), gate, bias)
        assert np.array_equal(alone[0][0], ids[t])
        assert np.array_equal(alone[1][0], weights[t])


def test_the_reference_chooses_as_deepseek_v3_is_written_in_torch() -> None:
    """The same said with tensors: so the reference is not only our reading of ourselves."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 64, generator=generator, dtype=torch.float64)
    bias = 0.2 * torch.randn(64, generator=generator, dtype=torch.float64)
    scores = logits.sigmoid()
    choice = scores + bias
    groups = choice.view(30, 8, 8).topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    mask = torch.zeros(30, 8, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(8, dim=1)
    ids = choice.masked_fill(~mask, -torch.inf).topk(8, dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    for t in range(30):
        shape = Shape(8, "sigmoid", True, 2.5, 8, 4, "top_two_sum")
        chosen, shares = route(logits[t].tolist(), shape, bias.tolist())
        assert chosen == ids[t].tolist()
        np.testing.assert_allclose(shares, weights[t], rtol=1e-12)


def test_a_bias_chooses_and_weighs_nothing() -> None:
    gate, hidden = np.zeros((8, HIDDEN), np.float32), np.ones((1, HIDDEN), np.float32)
    bias = np.array([0, 0, -9, 0, 0, 5, 0, 7], np.float32)
    ids, weights, _ = computed(Shape(3, "sigmoid"), hidden, gate, bias)
    assert ids.tolist() == [[7, 5, 0]]
    assert weights.tolist() == [[0.5, 0.5, 0.5]]


def test_a_bias_of_the_gate_is_part_of_the_logits() -> None:
    rng = np.random.default_rng(6)
    gate, hidden = rng.standard_normal((64, HIDDEN), np.float32), rng.standard_normal((9, HIDDEN), np.float32)
    bias = rng.standard_normal(64, np.float32)
    shape = Shape(4, "softmax_of_chosen")
    ids, weights, logits = computed(shape, hidden, gate, None, bias)
    np.testing.assert_array_equal(logits, computed(shape, hidden, gate, None)[2] + bias)
    expected = [route(row.tolist(), shape, None) for row in logits]
    assert ids.tolist() == [chosen for chosen, _ in expected]
    np.testing.assert_allclose(weights, [share for _, share in expected], rtol=3e-6)


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax_of_chosen"])
def test_extreme_logits_stay_finite(score: str) -> None:
    gate = np.zeros((4, HIDDEN), np.float32)
    gate[:, 0] = [400, -400, 90, -90]
    hidden = np.zeros((1, HIDDEN), np.float32)
    hidden[0, 0] = 1.0  # normed: sqrt(24)
    ids, weights, _ = computed(Shape(4, score), hidden, gate, None)  # type: ignore[arg-type]
    assert ids[0, 0] == 0
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()


def test_nan_leaves_valid_experts() -> None:
    gate = np.ones((8, HIDDEN), np.float32)
    hidden = np.full((2, HIDDEN), np.nan, np.float32)
    ids, weights, _ = computed(Shape(4, "sigmoid", True, 1.0, 4, 2, "top_two_sum"), hidden, gate, None)
    assert ((ids >= 0) & (ids < 8)).all()
    assert np.isnan(weights).all()


def test_refuses_what_does_not_fit() -> None:
    gate, hidden = np.zeros((12, HIDDEN), np.float32), np.ones((1, HIDDEN), np.float32)
    for shape, message in [
        (Shape(2, num_groups=5), "num_groups is 5; expected a divisor of the number of experts, 12"),
        (Shape(2, num_groups=4, top_groups=5), "top_groups is 5; expected 1 to num_groups, 4"),
        (Shape(4, num_groups=4), "top_k is 4; expected at most the experts of top_groups groups, 3"),
        (Shape(2, group_score="mean"), 'group_score is "mean"'),  # type: ignore[arg-type]
    ]:
        with pytest.raises(KernelError, match=message):
            computed(shape, hidden, gate, None)
    with pytest.raises(KernelError, match=r"bias is float32 \(11,\); expected float32 \(12,\)"):
        computed(Shape(2), hidden, gate, np.zeros(11, np.float32))
