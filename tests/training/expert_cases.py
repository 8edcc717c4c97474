"""Random experts of a layer, their inputs, and the layer in float64 by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from twofold import _core
from twofold.blocks import ops
from twofold.training.experts import ExpertLayer
from twofold.training.factors import Factors
from twofold.weights.weight_format import WeightMatrix, element_type

MakeMatrix: TypeAlias = Callable[[np.random.Generator, str, int, int], WeightMatrix]
EXPERTS, HIDDEN, INNER, RANK, TOKENS, TOP_K = 6, 256, 256, 3, 150, 3
CASES: dict[str, dict[str, Any]] = {
    "f32": {"formats": ("f32",) * 3},
    "bf16": {"formats": ("bf16",) * 3},
    "q8_0": {"formats": ("q8_0",) * 3},
    "q4_k beside q6_k": {"formats": ("q4_k", "q4_k", "q6_k")},
    "gpt-oss": {"formats": ("bf16",) * 3, "activation": "swiglu_oai", "biases": True, "limit": 0.7},
    "limited": {"formats": ("f32",) * 3, "limit": 0.2},
    "limited before": {"formats": ("f32",) * 3, "activation": "silu_of_limited", "limit": 0.2},
    "gelu": {"formats": ("f32",) * 3, "activation": "gelu_tanh"},
    "odd sizes": {"formats": ("f32",) * 3, "hidden": 37, "inner": 21},
}


@dataclass
class Case:
    """One layer's experts in a store, and their weights as torch has them."""

    store: _core.ExpertStore
    gate: Tensor
    up: Tensor
    down: Tensor
    biases: Tensor | None
    activation: str
    limit: float
    sizes: tuple[int, int]

    def expected(
        self, x: Tensor, ids: Tensor, weights: Tensor, factors: list[tuple[Tensor, Tensor, float]]
    ) -> Tensor:
        """The layer in float64, expert by expert."""
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, rank = torch.where(ids == expert)
            rows = x[token]
            gate, up = (self._product(rows, expert, matrix, factors[matrix]) for matrix in (0, 1))
            activated = self._activated(gate, up)
            out = self._product(activated, expert, 2, factors[2])
            total = total.index_add(0, token, out * weights[token, rank, None])
        return total

    def _product(self, x: Tensor, expert: int, matrix: int, factors: tuple[Tensor, Tensor, float]) -> Tensor:
        weights = (self.gate, self.up, self.down)[matrix][expert]
        a, b, scale = factors
        y = x @ weights.T + scale * ((x @ a[expert].T) @ b[expert].T)
        if self.biases is not None:
            inner = self.sizes[1]
            begin = (0, inner, 2 * inner)[matrix]
            y = y + self.biases[expert, begin : begin + len(weights)]
        return y

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.limit or float("inf")
        up = up.clamp(-limit, limit)
        if self.activation == "swiglu_oai":
            gate = gate.clamp(max=limit)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        if self.activation == "silu_of_limited":
            return torch.nn.functional.silu(gate.clamp(max=limit)) * up
        if self.activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh").clamp(max=limit) * up
        return torch.nn.functional.silu(gate).clamp(max=limit) * up


def quantised(draw: np.random.Generator, format: str, rows: int, columns: int) -> WeightMatrix:
    """Normal weights in a format."""
    values = draw.normal(scale=columns**-0.5, size=(rows, columns)).astype(np.float32)
    data = values if format == "f32" else ops.quantise_rows(ops.ThreadPool(1), values, format)
    return WeightMatrix(
        np.frombuffer(data.tobytes(), element_type(format)).reshape(rows, -1), format, columns
    )


def case_of(
    formats: tuple[str, str, str],
    activation: str = "silu",
    biases: bool = False,
    limit: float = 0.0,
    hidden: int = HIDDEN,
    inner: int = INNER,
    make: MakeMatrix | None = None,
) -> Case:
    """make: (generator, format, rows, columns) to a matrix; None: normal weights, quantised here."""
    draw, pool = np.random.default_rng(5), ops.ThreadPool(1)
    store = _core.ExpertStore(
        EXPERTS, hidden, inner, [formats], activation=activation, biases=biases, limits=[limit]
    )
    matrices: list[list[WeightMatrix]] = []
    for format, (rows, columns) in zip(
        formats, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
    ):
        matrices.append([(make or quantised)(draw, format, rows, columns) for _ in range(EXPERTS)])
    store.put(pool, 0, 0, list(zip(*matrices, strict=True)))
    added = draw.normal(scale=0.3, size=(EXPERTS, 2 * inner + hidden)).astype(np.float32)
    if biases:
        store.put_biases(0, 0, added)
    gate, up, down = (
        torch.from_numpy(np.stack([ops.dequantise(pool, each) for each in of_experts])).double()
        for of_experts in matrices
    )
    of_biases = torch.from_numpy(added).double() if biases else None
    return Case(store, gate, up, down, of_biases, activation, limit, (hidden, inner))


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, list[Factors], Tensor]:
    """x, ids, weights, factors and the gradient of the output. Expert 0 gets most tokens, the last one none."""
    torch.manual_seed(3)
    hidden, inner = case.sizes
    x, dy = torch.randn(TOKENS, hidden), torch.randn(TOKENS, hidden)
    chances = torch.tensor([8.0, 1, 1, 1, 1, 0])
    ids = torch.multinomial(chances.expand(TOKENS, -1), TOP_K)
    weights = torch.rand(TOKENS, TOP_K)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    factors = [
        Factors(0.1 * torch.randn(EXPERTS, RANK, columns), 0.1 * torch.randn(EXPERTS, rows, RANK), scale)
        for (rows, columns), scale in zip(shapes, (0.5, 2.0, 1.5), strict=True)
    ]
    return x, ids, weights, factors, dy


def run(case: Case, threads: int = 2, *, keeps: bool = True) -> list[Tensor]:
    """y, and the gradients of x, the weights and all factors."""
    x, ids, weights, factors, dy = inputs(case)
    leaves = [x, weights, *(each for pair in factors for each in (pair.a, pair.b))]
    for leaf in leaves:
        leaf.requires_grad_()
    layer = ExpertLayer(ops.ThreadPool(threads), case.store, 0, keeps=keeps)
    y = layer(x, ids, weights, tuple(factors))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def by_torch(case: Case) -> list[Tensor]:
    """The same in float64."""
    x, ids, weights, factors, dy = inputs(case)
    of_torch = [(each.a.double(), each.b.double(), each.scale) for each in factors]
    leaves = [x.double(), weights.double(), *(each for a, b, _ in of_torch for each in (a, b))]
    for leaf in leaves:
        leaf.requires_grad_()
    y = case.expected(leaves[0], ids, leaves[1], of_torch)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
