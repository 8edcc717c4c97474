"""Which experts of a micro-batch a device computes, and what that costs: a plan for each layer, by the cost model.

An expert with many tokens is worth its two uploads, one for forward and one for backward; the CPU computes the others
meanwhile. Layers are planned by `_core.CostModel.plan_streams` with figures of forward and backward together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold import _core
from twofold.training.device_experts import DeviceExperts, LayerInput, Pairs
from twofold.training.factors import Factors

_PASSES: Final = 3
"""Products of an expert on a device: forward, forward again, gradients of its rows."""
_UPLOADS: Final = 2


@dataclass
class LaneTotals:
    """What a run's plans were, summed over layers and micro-batches."""

    layers: int = 0
    rows: int = 0
    rows_on_device: int = 0
    experts: int = 0
    experts_on_device: int = 0
    planned_us: float = 0.0
    """Time of forward and backward by the cost model."""
    on_cpu_us: float = 0.0
    """The same with all experts on the CPU."""


@dataclass(frozen=True)
class BackwardResult:
    """See `DeviceExperts.backward`."""

    dx: Tensor
    dweights: Tensor
    factors: tuple[Tensor | None, ...]


class LaneShare:
    """A device's experts of one layer and micro-batch."""

    def __init__(self, lane: DeviceLane, layer: int, ids: npt.NDArray[np.int32], chosen: list[int]) -> None:
        """chosen: the experts in the order of their uploads."""
        assert lane.experts is not None
        self._device, self._layer = lane.experts, layer
        self.experts = torch.tensor(chosen)
        self.pairs = [self._pairs_of(ids, expert) for expert in chosen]
        self.elsewhere = [int(expert in set(chosen)) for expert in range(lane.num_experts)]
        """By expert, 1 where the device computes it."""

    def _pairs_of(self, ids: npt.NDArray[np.int32], expert: int) -> Pairs:
        tokens, ranks = (torch.from_numpy(each) for each in np.nonzero(ids == expert))
        place = self._device.torch_device
        return Pairs(expert, tokens.to(place), ranks.to(place))

    def forward(self, hidden: Tensor, weights: Tensor, factors: tuple[Factors | None, ...]) -> Tensor:
        """See `DeviceExperts.forward`."""
        return self._device.forward(self._input(hidden, weights, factors), self.pairs)

    def backward(
        self, hidden: Tensor, weights: Tensor, factors: tuple[Factors | None, ...], dy: Tensor
    ) -> BackwardResult:
        """dy: gradient [tokens, hidden] of what `forward` returned."""
        of = self._input(hidden, weights, factors)
        found = tuple(
            part
            for each in of.factors
            for part in ((None, None) if each is None else (self._rows(each.a), self._rows(each.b)))
        )
        dx, dweights = self._device.backward(of, self.pairs, dy.to(self._device.torch_device), found)
        return BackwardResult(dx, dweights, found)

    def _rows(self, factor: Tensor) -> Tensor:
        return torch.empty((len(self.pairs), *factor.shape[1:]), device=self._device.torch_device)

    def _input(self, hidden: Tensor, weights: Tensor, factors: tuple[Factors | None, ...]) -> LayerInput:
        place = self._device.torch_device
        moved = tuple(
            None
            if each is None
            else Factors(each.a.detach().to(place), each.b.detach().to(place), each.scale)
            for each in factors
        )
        return LayerInput(self._layer, hidden.detach().to(place), weights.detach().to(place), moved)


@dataclass
class DeviceLane:
    """Plans a model's layers for one device.

    With `experts` None it is emulated: the CPU computes all, and times are virtual.
    """

    cost: _core.CostModel
    num_experts: int
    experts: DeviceExperts | None = None
    totals: LaneTotals = field(default_factory=LaneTotals)

    def share(self, layer: int, ids: npt.NDArray[np.int32]) -> LaneShare | None:
        """The device's part of a layer with this routing [tokens, top_k]; None: the CPU computes all."""
        loads = np.bincount(ids.reshape(-1), minlength=self.num_experts)
        chosen, planned_us, on_cpu_us = self.cost.plan_streams(loads.tolist())
        totals = self.totals
        totals.layers += 1
        totals.rows += ids.size
        totals.rows_on_device += int(loads[chosen].sum())
        totals.experts += int((loads > 0).sum())
        totals.experts_on_device += len(chosen)
        totals.planned_us += planned_us
        totals.on_cpu_us += on_cpu_us
        if self.experts is None or not chosen:
            return None
        return LaneShare(self, layer, ids, chosen)


def training_cost(
    figures: Mapping[str, float], store: _core.ExpertStore, curve: list[tuple[int, float]]
) -> _core.CostModel:
    """Cost of forward and backward of a layer.

    Args:
        figures: a profile's `cost_figures`.
        curve: (tokens of one expert, microseconds of both on the CPU).
    """
    twice = ("handshake_us", "gpu_launch_us", "join_us", "link_latency_us")
    both = {name: value * (_UPLOADS if name in twice else 1) for name, value in figures.items()}
    profile = _core.MachineProfile.from_fields("training", both)
    size = max(1, store.mean_expert_bytes)
    return _core.CostModel(profile, _UPLOADS * size, _PASSES * store.flops_per_token, curve)


def totals_line(totals: LaneTotals, device: str, *, is_virtual: bool) -> str:
    """One line that tells what a run's plans did."""
    if not totals.rows:
        return f"{device}: no layer was planned"
    share, gain = totals.rows_on_device / totals.rows, totals.on_cpu_us / totals.planned_us
    on_device, active = (count / totals.layers for count in (totals.experts_on_device, totals.experts))
    clock = " on its virtual clock; the CPU computed them" if is_virtual else " by the cost model"
    return (
        f"{device}: {on_device:.1f} of {active:.1f} experts of a layer, {share:.0%} of the rows; routed experts "
        f"{gain:.2f} × as fast as the CPU alone{clock}"
    )
