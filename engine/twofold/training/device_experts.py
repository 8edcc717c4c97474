"""Routed experts in training on a device: each passes through a staging slot and is multiplied by torch.

An expert is uploaded as it is stored, unpacked to rows there, and read once for all its tokens. Backward computes an
expert's forward again, so that nothing of it is kept on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from twofold import _core
from twofold.device.device import Device
from twofold.training.factors import Factors

COLUMNS: int = 16
"""Sizes that kernels unpack are multiples of it."""


@dataclass(frozen=True)
class ExpertKind:
    """What the experts of a layer have besides their sizes."""

    activation: str
    limit: float
    """See `MoeShape.limits`; 0: none."""
    biases: bool

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """As kernels/include/twofold/expert.h."""
        limit = self.limit or float("inf")
        up = up.clamp(-limit, limit)
        if self.activation == "swiglu_oai":
            gate = gate.clamp(max=limit)
            return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
        if self.activation == "silu_of_limited":
            return silu(gate.clamp(max=limit)) * up
        if self.activation == "gelu_tanh":
            return gelu(gate, approximate="tanh").clamp(max=limit) * up
        return silu(gate).clamp(max=limit) * up


@dataclass(frozen=True)
class Pairs:
    """The tokens of one expert: int64 tensors on the rows' device."""

    expert: int
    tokens: Tensor
    ranks: Tensor
    """Which of a token's experts it is."""


@dataclass(frozen=True)
class LayerInput:
    """A layer's input on the device.

    hidden [tokens, hidden] and weights [tokens, top_k]; factors of gate, up and down.
    """

    layer: int
    hidden: Tensor
    weights: Tensor
    factors: tuple[Factors | None, ...]


class DeviceExperts:
    """Forward and backward of some experts of a layer on one device. Calls run on torch's current stream."""

    def __init__(
        self,
        device: Device,
        store: _core.ExpertStore,
        kinds: Sequence[ExpertKind],
        sizes: tuple[int, int],
        link: tuple[float, float],
    ) -> None:
        """
        Args:
            kinds: by layer.
            sizes: (hidden, intermediate), multiples of 16.
            link: (latency in microseconds, GB/s).

        Raises:
            CapacityError: no room for two experts as stored.
        """
        self._device, self._kinds, (self._hidden, self._inner) = device, kinds, sizes
        self._stream = device.native.expert_stream(
            store, link_latency_us=link[0], link_bandwidth_gbps=link[1]
        )
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None
        floats = 2 * self._inner + -(-self._hidden // COLUMNS) * COLUMNS
        self._biases = torch.empty(floats, device=device.torch_device)

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def forward(self, of: LayerInput, pairs: Sequence[Pairs]) -> Tensor:
        """float32 [tokens, hidden]: the sum of what these experts add to each token."""
        y = torch.zeros(of.hidden.shape, device=self.torch_device)
        for each, weights in self._visited(of, pairs):
            leaves = _leaves(of, each)
            y.index_add_(0, each.tokens, self._output(of, weights, leaves))
        return y

    def backward(
        self, of: LayerInput, pairs: Sequence[Pairs], dy: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """(dx [tokens, hidden], dweights [tokens, top_k]) in float32.

        gradients: of a and b of gate, up and down, [len(pairs), ...]; they are set.
        """
        dx = torch.zeros(of.hidden.shape, device=self.torch_device)
        dweights = torch.zeros(of.weights.shape, device=self.torch_device)
        for number, (each, weights) in enumerate(self._visited(of, pairs)):
            leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in _leaves(of, each)]
            with torch.enable_grad():
                out = self._output(of, weights, leaves)
            trained = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(out, trained, dy[each.tokens].float()))
            dx.index_add_(0, each.tokens, next(found).float())
            dweights[each.tokens, each.ranks] = next(found).float()
            for gradient, leaf in zip(gradients, leaves[2:], strict=True):
                if gradient is not None and leaf is not None:
                    gradient[number] = next(found)
        return dx, dweights

    def _output(self, of: LayerInput, weights: _Rows, leaves: Sequence[Tensor | None]) -> Tensor:
        """float32 [n, hidden] of one expert. leaves: as `_leaves`."""
        x, of_tokens, *factors = leaves
        assert x is not None
        assert of_tokens is not None

        def product(rows: Tensor, matrix: int) -> Tensor:
            y = linear(rows, weights.matrices[matrix]).float()
            if weights.biases is not None:
                y = y + weights.biases[matrix]
            a, b = factors[2 * matrix : 2 * matrix + 2]
            if a is None or b is None:
                return y
            scale = of.factors[matrix].scale  # type: ignore[union-attr]
            return y + scale * linear(linear(rows, a.to(rows.dtype)), b.to(rows.dtype)).float()

        activated = self._kinds[of.layer].activated(product(x, 0), product(x, 1))
        return product(activated.to(x.dtype), 2) * of_tokens[:, None].float()

    def _visited(self, of: LayerInput, pairs: Sequence[Pairs]) -> Iterator[tuple[Pairs, _Rows]]:
        """Each of the experts, with its weights in memory that the next one reuses."""
        stream, compute = self._stream, self._device.stream()
        if pairs:
            stream.begin(of.layer, pairs[0].expert)
        for number, each in enumerate(pairs):
            stream.enter(compute)
            if number + 1 < len(pairs):
                stream.begin(of.layer, pairs[number + 1].expert)
            rows = self._unpacked(of, compute)
            stream.leave(compute)
            yield each, rows

    def _unpacked(self, of: LayerInput, compute: int) -> _Rows:
        dtype = of.hidden.dtype
        if self._rows is None or self._rows[0].dtype != dtype:
            gate, down = (self._inner, self._hidden), (self._hidden, self._inner)
            self._rows = tuple(  # type: ignore[assignment]
                torch.empty(shape, dtype=dtype, device=self.torch_device) for shape in (gate, gate, down)
            )
        assert self._rows is not None
        for matrix, out in enumerate(self._rows):
            self._stream.unpack(matrix, out, is_bf16=dtype == torch.bfloat16, stream=compute)
        if not self._kinds[of.layer].biases:
            return _Rows(self._rows, None)
        self._stream.read_biases(self._biases, compute)
        inner, hidden = self._inner, self._hidden
        biases = self._biases[:inner], self._biases[inner : 2 * inner], self._biases[2 * inner :][:hidden]
        return _Rows(self._rows, biases)


@dataclass(frozen=True)
class _Rows:
    """An expert's matrices [rows, columns] and biases, of gate, up and down."""

    matrices: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor] | None


def _leaves(of: LayerInput, pairs: Pairs) -> list[Tensor | None]:
    """What an expert's output depends on: rows of its tokens, their weights, a and b of gate, up and down."""
    flat = [
        part
        for each in of.factors
        for part in ((None, None) if each is None else (each.a[pairs.expert], each.b[pairs.expert]))
    ]
    return [of.hidden[pairs.tokens], of.weights[pairs.tokens, pairs.ranks], *flat]
