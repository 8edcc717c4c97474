"""Gradients of routed experts and their factors, against torch in float64 with the dequantised weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.blocks import ops
from twofold.training.experts import ExpertLayer

from tests.training.expert_cases import CASES, Case, case_of, inputs


def run(case: Case, threads: int = 2, *, keeps: bool = True) -> list[Tensor]:
    """y, and the gradients of x, the weights and all factors."""
    x, ids, weights, factors, dy = inputs(case)
    leaves = [x, weights, *(each for pair in factors for each in (pair.a, pair.b))]
    for leaf in leaves:
        leaf.requires_grad_()
    layer = ExpertLayer(ops.ThreadPool(threads), case.store, 0, keeps=keeps)
    y = layer(x, ids, weights, tuple(factors))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_torch(name: str) -> None:
    case = case_of(**CASES[name])
    x, ids, weights, factors, dy = inputs(case)
    of_torch = [(each.a.double(), each.b.double(), each.scale) for each in factors]
    leaves = [x.double(), weights.double(), *(each for a, b, _ in of_torch for each in (a, b))]
    for leaf in leaves:
        leaf.requires_grad_()
    y = case.expected(leaves[0], ids, leaves[1], of_torch)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for ours, theirs in zip(run(case), expected, strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < 1e-5, f"{error:.1e} of the largest of {tuple(theirs.shape)}"
        assert theirs.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["q4_k beside q6_k", "gpt-oss"])
def test_threads_and_what_is_kept_change_no_bit(name: str) -> None:
    case = case_of(**CASES[name])
    first = run(case, 1)
    for threads, keeps in ((2, True), (7, True), (7, False)):
        for one, other in zip(first, run(case, threads, keeps=keeps), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_matrices_without_factors_pass_gradients_to_their_input() -> None:
    case = case_of(**CASES["f32"])
    x, ids, weights, factors, dy = inputs(case)
    none = [(torch.zeros_like(each.a).double(), each.b.double(), 0.0) for each in factors]
    leaf = x.double().requires_grad_()
    expected = torch.autograd.grad(case.expected(leaf, ids, weights.double(), none), leaf, dy.double())[0]
    x.requires_grad_()
    layer = ExpertLayer(ops.ThreadPool(2), case.store, 0)
    ours = torch.autograd.grad(layer(x, ids, weights, (None, None, None)), x, dy)[0]
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
