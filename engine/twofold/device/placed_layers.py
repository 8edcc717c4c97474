"""Routed experts of a step that the host places: prefill, mixed batches, and decode steps that are not table steps.

The host decides the layer when its routing has arrived (`MoeExecutor.begin_layer`). Each device then computes the
experts in its slots, and the CPU the others; the device whose layer it is adds all outputs in the order of a token's
experts, so that the sum does not depend on where they ran. docs/explanation/gpu-status.md lists which GPUs this has run
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold import _core
from twofold._core import Placement
from twofold._core.device import CombinedLayer
from twofold.blocks.device_step import CachePrior
from twofold.device.adapters.step import AdaptedExperts
from twofold.device.cache_prior import PriorRows
from twofold.device.device import Device
from twofold.device.placed_share import Parcel, PlacedShare
from twofold.experts.slot_plan import MoeShape


class PlacedLayers:
    """Implements `model.DeviceMoe` for steps of any shape; there are no padding rows."""

    def __init__(
        self,
        devices: Sequence[Device],
        accelerator: _core.DeviceAccelerator,
        executor: _core.MoeExecutor,
        shape: MoeShape,
        cache_prior: float = 0.0,
        *,
        homes: Sequence[int] = (),
        adapters: bool = False,
    ) -> None:
        """Allocate nothing yet: buffers grow with the largest step.

        Args:
            devices: those of the accelerator.
            accelerator: the devices' accelerator, which the executor plans for.
            cache_prior: routing bias towards experts that were in slots at the start of the step.
            homes: for each layer with experts the device with its dense part; empty: the first one.
            adapters: whether rows may use adapters.

        Raises:
            ConfigError: a device has no kernels for the formats.
        """
        self._device, self._homes = devices[0], homes or (0,) * shape.num_layers
        self._executor, self._shape = executor, shape
        self._shares = [
            PlacedShare(device, accelerator, shape, index, adapters=adapters)
            for index, device in enumerate(devices)
        ]
        self._cache_prior = cache_prior
        self._prior_rows: PriorRows | None = None
        self._transfers = {home: devices[home].transfers() for home in set(self._homes)}
        self._from_cpu = torch.empty(0, 0)
        # Marks of a layer whose time is not read yet: the end of the previous layer there, its own start and end; and
        # its home. The previous layer's is None if it was elsewhere.
        self._open: tuple[Any, Any, Any, int] | None = None
        self._ended: Any = None
        self._next_scores: Tensor | None = None
        self._adapted: Sequence[AdaptedExperts] = ()

    @property
    def look_ahead(self) -> Callable[[Tensor], None] | None:
        """See `model.DeviceMoe.look_ahead`."""
        return self._take_scores if self._executor.needs_look_ahead else None

    def _take_scores(self, scores: Tensor) -> None:
        self._next_scores = scores

    def begin_step(self, adapted: Sequence[AdaptedExperts] = ()) -> None:
        """Call after the executor's begin_step; discards an aborted step. adapted: adapters of its rows by device."""
        self._adapted = adapted
        self._open = self._ended = self._prior_rows = self._next_scores = None

    def cache_prior(self, moe_layer: int, num_tokens: int) -> CachePrior | None:
        """See `model.DeviceMoe.cache_prior`."""
        if self._prior_rows is None or (prior := self._prior_rows.of_layer(moe_layer, num_tokens)) is None:
            return None
        home = self._shares[self._homes[moe_layer]].device
        return CachePrior(prior.strength, prior.experts.to(home.torch_device))

    def fill_cache_prior(self, states: npt.NDArray[np.uint8], generated: Sequence[bool]) -> None:
        """Call after begin_step. See `TableLayers.fill_cache_prior`."""
        self._prior_rows = PriorRows(
            self._shape, len(generated), self._cache_prior, self._device.torch_device
        )
        self._prior_rows.fill(states, generated)

    def end_step(self) -> None:
        """Call before the executor's end_step, with the step's results on the host."""
        self._end_layer()

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """See `model.DeviceMoe.forward`; waits for the routing.

        Raises:
            CapacityError: a device has no room for the step's buffers.
            KernelError: a device failed.
        """
        index, num_tokens = self._homes[moe_layer], len(normed)
        home, transfers = self._shares[index], self._transfers[index]
        began = transfers.mark()
        transfers.begin(normed, ids, weights)
        host_ids, host_weights = transfers.routing()
        # The devices have passed the previous layer: its time can be read and its buffers are free.
        self._end_layer()
        if self._next_scores is not None:
            self._executor.predict(moe_layer + 1, self._next_scores.cpu().numpy())
            self._next_scores = None
        plan = self._executor.begin_layer(moe_layer, host_ids, host_weights)

        parcel = home.open(plan, moe_layer, num_tokens)
        where = parcel.put(plan.where)
        all_rows = parcel.put(np.full(num_tokens, int(Placement.CPU), np.uint8)) if plan.joins_deferred else 0
        arriving = [
            self._begin_elsewhere(share, plan, moe_layer, (normed, ids), parcel)
            for share in self._shares
            if share is not home
        ]
        home.send()
        if self._adapted:
            home.compute_adapted(normed, ids, where, self._adapted[index])
        else:
            home.compute(normed)
        for rows, pairs in (each for each in arriving if each is not None):
            home.outputs.index_copy_(0, pairs, rows.to(normed.device, non_blocking=True))
        from_cpu = self._cpu_rows(num_tokens)
        if plan.uses_cpu:
            self._executor.compute_cpu(transfers.rows(), from_cpu[:num_tokens].numpy())

        def add(where: int, top_k: int, from_cpu: Tensor | None) -> None:
            layer = CombinedLayer(
                outputs=home.outputs,
                weights=weights,
                where=where,
                from_cpu=from_cpu,
                num_tokens=num_tokens,
                top_k=top_k,
                hidden_size=self._shape.hidden,
                hidden=hidden,
            )
            home.device.native.combine(layer, transfers.stream)

        add(where, self._shape.top_k, None if all_rows else from_cpu)
        if all_rows:  # see TableLayers.forward
            add(all_rows, 1, from_cpu)
        before, self._ended = self._ended, (transfers.mark(), index)
        elsewhere = before is None or before[1] != index
        self._open = None if elsewhere else before[0], began, self._ended[0], index

    def _begin_elsewhere(
        self,
        share: PlacedShare,
        plan: _core.LayerPlan,
        moe_layer: int,
        routed: tuple[Tensor, Tensor],
        home: Parcel,
    ) -> tuple[Tensor, Tensor] | None:
        """Launch another device's experts: (outputs f32 [n, hidden] there, their pairs int64 [n] on the layer's
        device). None: it has none.

        Args:
            routed: rows and their experts' numbers on the layer's device.
            home: the parcel of the layer's device, which the pairs' numbers travel with.
        """
        parcel = share.open(plan, moe_layer, len(routed[0]))
        if not share.has_work:
            return None
        parts = plan.ready(share.index), plan.awaited(share.index)
        pairs = np.concatenate([part.pairs for part in parts]).astype(np.int64)
        here, there = parcel.put_tensor(pairs), home.put_tensor(pairs)
        where = parcel.put(plan.where) if self._adapted else 0
        with share.device.active():
            share.send()
            normed, ids = (each.to(share.device.torch_device, non_blocking=True) for each in routed)
            if self._adapted:
                share.compute_adapted(normed, ids, where, self._adapted[share.index])
            else:
                share.compute(normed)
            return share.outputs.index_select(0, here), there

    def _end_layer(self) -> None:
        if self._open is not None:
            before, began, ended, home = self._open
            between = self._transfers[home].us_between
            self._executor.end_layer(
                between(began, ended), -1.0 if before is None else between(before, began)
            )
            self._open = None

    def _cpu_rows(self, num_tokens: int) -> Tensor:
        """The CPU's share in mapped memory, f32 [at least num_tokens, hidden]."""
        if len(self._from_cpu) < num_tokens:
            self._from_cpu = self._device.staging_buffer((num_tokens, self._shape.hidden), torch.float32)
        return self._from_cpu
