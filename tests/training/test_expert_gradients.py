"""Gradients of routed experts and their factors, against torch in float64 with the dequantised weights."""

from __future__ import annotations

import pytest
import torch
from twofold.blocks import ops
from twofold.training.experts import ExpertLayer

from tests.training.expert_cases import CASES, by_torch, case_of, inputs, run


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_torch(name: str) -> None:
    case = case_of(**CASES[name])
    for ours, theirs in zip(run(case), by_torch(case), strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < 1e-5, f"{error:.1e} of the largest of {tuple(theirs.shape)}"
        assert theirs.abs().max() > 1e-3


def test_gradients_are_differences_of_the_output() -> None:
    """Without torch's derivatives: the change of the output between two near inputs. No limit, where it would bend."""
    case = case_of(**CASES["gelu"])
    x, ids, weights, factors, dy = inputs(case)
    layer = ExpertLayer(ops.ThreadPool(2), case.store, 0)
    _, dx, dweights, *of_factors = run(case)
    torch.manual_seed(7)
    leaves = [x, weights, *(part for each in factors for part in (each.a, each.b))]
    for leaf, gradient in zip(leaves, (dx, dweights, *of_factors), strict=True):
        kept, towards = leaf.clone(), torch.randn_like(leaf)
        sums = []
        for step in (1e-3, -1e-3):
            leaf.copy_(kept + step * towards)
            y = layer(x, ids, weights, tuple(factors))
            sums.append(float((y.double() * dy.double()).sum()))
        leaf.copy_(kept)
        along = float((gradient.double() * towards.double()).sum())
        room = 2e-2 * float(gradient.double().norm())
        assert abs((sums[0] - sums[1]) / 2e-3 - along) < room


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
