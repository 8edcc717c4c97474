"""Routed experts of a step that the host places, layer by layer: prefill chunks, mixed batches, decode without a table.

Each layer's routing is copied to the host and the executor assigns its experts (`MoeExecutor.begin_layer`). Then both
sides work at once. The device computes the experts in slots, then fetched ones as soon as their uploads finish, with
grouped GEMM where there are many tokens; the CPU computes the rest. `combine` joins them. The host is at most one
layer ahead of the device. docs/explanation/gpu-status.md lists which GPUs this has run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold import _core
from twofold._core import Placement
from twofold._core.device import (
    CombinedLayer,
    DecodeShape,
    EncodedRows,
    ExpertBuffers,
    ExpertGroups,
    PrefillRows,
    PrefillTiles,
    tile_groups,
    tile_tokens_for,
)
from twofold.api.errors import CapacityError
from twofold.blocks.device_step import CachePrior
from twofold.device.cache_prior import PriorRows
from twofold.device.device import Device
from twofold.device.layouts import layouts_of
from twofold.device.parcel import Parcel
from twofold.experts.slot_plan import MoeShape

DECODE_TOKENS: Final = 32
"""Up to this many tokens the decode kernels read each weight about once; above it, tensor cores are faster."""


@dataclass(frozen=True)
class _Room:
    """Buffers for layers of up to `num_tokens` tokens."""

    num_tokens: int
    encoded: Tensor
    intermediate: Tensor
    outputs: Tensor
    gate_up: Tensor
    from_cpu: Tensor
    parcel: Parcel


@dataclass(frozen=True)
class _Launch:
    """Kernel arguments for one part of a layer's experts."""

    groups: ExpertGroups
    num_groups: int
    tiles: PrefillTiles | None = None
    """None: computed by the decode kernels."""


class PlacedLayers:
    """Implements `model.DeviceMoe` for steps of any shape; there are no padding rows."""

    look_ahead = None

    def __init__(
        self,
        device: Device,
        accelerator: _core.DeviceAccelerator,
        executor: _core.MoeExecutor,
        shape: MoeShape,
        cache_prior: float = 0.0,
    ) -> None:
        """Allocate nothing yet: buffers grow with the largest step.

        Args:
            accelerator: the device's accelerator, which the executor plans for.
            cache_prior: routing bias towards experts that were in slots at the start of the step.

        Raises:
            ConfigError: the device has no kernels for the formats.
        """
        self._device, self._native, self._accelerator = device, device.native, accelerator
        self._executor, self._shape = executor, shape
        self._layouts = layouts_of(shape)
        self._cache_prior = cache_prior
        self._prior_rows: PriorRows | None = None
        whole = shape.hidden % 16 == 0 and shape.intermediate % 16 == 0
        self._tensor_cores = [whole and "f32" not in formats for formats in shape.formats]
        self._shared_bytes = device.shared_bytes
        self._transfers = device.transfers()
        self._room: _Room | None = None
        # Marks of a layer whose time is not read yet: the end of the previous layer, its own start and end.
        self._open: tuple[Any, Any, Any] | None = None
        self._ended: Any = None

    def begin_step(self) -> None:
        """Call after the executor's begin_step; discards an aborted step."""
        self._open = self._ended = self._prior_rows = None

    def cache_prior(self, moe_layer: int, num_tokens: int) -> CachePrior | None:
        """See `model.DeviceMoe.cache_prior`."""
        return None if self._prior_rows is None else self._prior_rows.of_layer(moe_layer, num_tokens)

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
            CapacityError: the device has no room for the step's buffers.
            KernelError: the device failed.
        """
        transfers = self._transfers
        room = self._room_for(len(normed))
        began = transfers.mark()
        transfers.begin(normed, ids, weights)
        host_ids, host_weights = transfers.routing()
        # The device has passed the previous layer: its time can be read and its buffers are free.
        self._end_layer()
        plan = self._executor.begin_layer(moe_layer, host_ids, host_weights)

        many = len(normed) > DECODE_TOKENS and self._tensor_cores[moe_layer]
        room.parcel.open()
        where = room.parcel.put(plan.where)
        ready, awaited = (self._packed(part, room.parcel, many) for part in (plan.ready, plan.awaited))
        all_rows = (
            room.parcel.put(np.full(len(normed), int(Placement.CPU), np.uint8)) if plan.joins_deferred else 0
        )
        room.parcel.send(transfers.stream)
        if not many and ready.num_groups + awaited.num_groups > 0:
            self._encode(moe_layer, normed, room)
        self._launch(moe_layer, ready, normed, room)
        self._accelerator.before_compute(transfers.stream)
        self._launch(moe_layer, awaited, normed, room)
        self._accelerator.after_compute(transfers.stream)
        if plan.uses_cpu:
            self._executor.compute_cpu(transfers.rows(), room.from_cpu[: len(normed)].numpy())

        def add(where: int, top_k: int, from_cpu: Tensor | None) -> None:
            layer = CombinedLayer(
                outputs=room.outputs,
                weights=weights,
                where=where,
                from_cpu=from_cpu,
                num_tokens=len(normed),
                top_k=top_k,
                hidden_size=self._shape.hidden,
                hidden=hidden,
            )
            self._native.combine(layer, transfers.stream)

        add(where, self._shape.top_k, None if all_rows else room.from_cpu)
        if all_rows:  # see TableLayers.forward
            add(all_rows, 1, room.from_cpu)
        ended, self._ended = self._ended, transfers.mark()
        self._open = ended, began, self._ended

    def _end_layer(self) -> None:
        if self._open is not None:
            before, began, ended = self._open
            between = self._transfers.us_between
            self._executor.end_layer(
                between(began, ended), -1.0 if before is None else between(before, began)
            )
            self._open = None

    def _packed(self, part: _core.PlacedGroups, parcel: Parcel, many: bool) -> _Launch:
        count, begin, pairs = len(part), part.begin, part.pairs
        groups = ExpertGroups(
            num_groups=parcel.put(np.array([count], np.int32)),
            weights=parcel.put(part.addresses),
            begin=parcel.put(begin),
            pairs=parcel.put(pairs),
            capacity=count,
        )
        if not many or count == 0:
            return _Launch(groups, count)
        tile_tokens = tile_tokens_for(len(pairs), count)
        tiles = tile_groups(begin, tile_tokens)
        return _Launch(
            groups, count, PrefillTiles(tiles=parcel.put(tiles), count=len(tiles), tokens=tile_tokens)
        )

    def _encode(self, moe_layer: int, normed: Tensor, room: _Room) -> None:
        rows = EncodedRows(
            kind=self._layouts[moe_layer].activations,
            rows=normed,
            num_tokens=len(normed),
            columns=self._shape.hidden,
            out=room.encoded,
        )
        self._native.encode(rows, self._transfers.stream)

    def _launch(self, moe_layer: int, part: _Launch, normed: Tensor, room: _Room) -> None:
        if part.num_groups == 0:
            return
        layout, stream, top_k = self._layouts[moe_layer], self._transfers.stream, self._shape.top_k
        buffers = ExpertBuffers(
            encoded=room.encoded, intermediate=room.intermediate, outputs=room.outputs, gate_up=room.gate_up
        )
        if part.tiles is not None:
            rows = PrefillRows(x=normed, num_tokens=len(normed), top_k=top_k)
            self._native.prefill_experts(layout, part.groups, buffers, part.tiles, rows, stream)
        else:
            bounds = DecodeShape(
                num_tokens=len(normed),
                top_k=top_k,
                num_experts=part.num_groups,
                shared_bytes=self._shared_bytes,
            )
            self._native.decode_experts(layout, part.groups, buffers, bounds, stream)

    def _room_for(self, num_tokens: int) -> _Room:
        if self._room is None or self._room.num_tokens < num_tokens:
            self._room = None  # free the old buffers first
            try:
                self._room = self._make_room(num_tokens)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"the device has no room for a step of {num_tokens} tokens; lower --gpu-memory-utilization, which "
                    "leaves more of it free, or --max-num-batched-tokens"
                ) from error
        return self._room

    def _make_room(self, num_tokens: int) -> _Room:
        shape, num_pairs = self._shape, num_tokens * self._shape.top_k

        def empty(size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=self._device.torch_device)

        tensor_cores = num_tokens > DECODE_TOKENS and any(self._tensor_cores)
        # Per expert an address, a start and a tile; per pair a number, a place and a share of a tile.
        parcel_bytes = 20 * shape.num_experts + 6 * num_pairs + num_tokens + 1024
        return _Room(
            num_tokens=num_tokens,
            encoded=empty(max(layout.encoded_bytes(num_tokens) for layout in self._layouts), torch.uint8),
            intermediate=empty(
                max(layout.intermediate_bytes(num_pairs) for layout in self._layouts), torch.uint8
            ),
            outputs=empty((num_pairs, shape.hidden), torch.float32),
            gate_up=empty(2 * num_pairs * shape.intermediate if tensor_cores else 0, torch.float32),
            from_cpu=self._device.staging_buffer((num_tokens, shape.hidden), torch.float32),
            parcel=Parcel(self._device, parcel_bytes),
        )
