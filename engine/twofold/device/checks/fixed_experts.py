"""Routed experts on a device with a fixed placement: resident experts run there, all others on the CPU.

For the self-check, measurements and GPU tests; no expert is uploaded. Decode steps are those of `TableLayers`; `server`
is the CPU side. docs/explanation/gpu-status.md lists which GPUs this has run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold._core.device import (
    CombinedLayer,
    ExpertBuffers,
    PrefillRows,
    PrefillTiles,
    tile_groups,
    tile_tokens_for,
)
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.device.backend import StepServer
from twofold.device.device import Device
from twofold.device.layouts import I32, I64, Grouping, by_expert, layouts_of
from twofold.device.table_layers import TableLayers
from twofold.experts.slot_plan import MoeShape


@dataclass(frozen=True)
class _FixedSlots:
    """Slots and store for `TableLayers`: slots never change and no expert is read from the store."""

    slots: Tensor
    """u8 [slots][stride]."""
    host_table: I32
    """[layers][experts] slot of each expert, -1: in none."""
    table: Tensor
    """The same table on the device."""
    top_k: int

    store_base = 0

    @property
    def slot_table(self) -> int:
        return self.table.data_ptr()

    @property
    def slot_base(self) -> int:
        return self.slots.data_ptr()

    @property
    def slot_stride(self) -> int:
        return self.slots.stride(0)

    def split_table(self) -> Sequence[int]:
        return [0] * (self.top_k + 1) ** 2

    def read_prices(self) -> Sequence[int]:
        return []

    def offsets(self, layer: int) -> I64:
        return np.zeros(self.host_table.shape[1], np.int64)


class DeviceExperts(TableLayers):
    """`TableLayers` with slots that are filled once."""

    def __init__(
        self,
        device: Device,
        resident: Sequence[Sequence[Tensor | None]],
        shape: MoeShape,
        max_tokens: int,
        handshake: str = "kernels",
        watchdog_s: float = 5.0,
    ) -> None:
        """Copy resident experts into slots.

        Args:
            resident: [layers][experts] the expert's panels as uint8 on the CPU; None: the expert runs on the CPU.
            max_tokens: tokens of a decode step, at most 32.
        """
        self._fixed = _filled(resident, shape, device.torch_device)
        super().__init__(
            device, self._fixed, self._fixed, shape, max_tokens=max_tokens, handshake=handshake,
            watchdog_s=watchdog_s,
        )  # fmt: skip

    def prefill(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """A layer of a prefill chunk with all experts resident and of the same formats; waits for the routing.

        Raises:
            KernelError: an expert is not resident.
        """
        native, shape = self._native, self._shape
        (layout,) = self._layouts[moe_layer].kinds
        device, stream = self._device.torch_device, self._device.stream()
        num_tokens, num_pairs = len(normed), ids.numel()
        experts, begin, pairs = by_expert(ids.cpu().numpy())
        slots = self._fixed.host_table[moe_layer][experts].astype(np.int64)
        if (slots < 0).any():
            raise KernelError(f"layer {moe_layer}: prefill needs experts that are in no slot")
        grouping = Grouping(len(experts), num_pairs, device)
        grouping.fill(self._fixed.slot_base + slots * self._fixed.slot_stride, begin, pairs)
        tile_tokens = tile_tokens_for(num_pairs, len(experts))
        tiles = torch.from_numpy(tile_groups(begin, tile_tokens)).to(device)
        intermediate = torch.empty(layout.intermediate_bytes(num_pairs), dtype=torch.uint8, device=device)
        outputs = torch.empty((num_pairs, shape.hidden), device=device)
        gate_up = torch.empty((num_pairs, 2 * shape.intermediate), device=device)
        buffers = ExpertBuffers(
            encoded=self._encoded.data_ptr(), intermediate=intermediate.data_ptr(), outputs=outputs.data_ptr(),
            gate_up=gate_up.data_ptr(),
        )  # fmt: skip
        native.prefill_experts(
            layout, grouping.groups, buffers,
            PrefillTiles(tiles=tiles.data_ptr(), count=len(tiles), tokens=tile_tokens),
            PrefillRows(x=normed.data_ptr(), num_tokens=num_tokens, top_k=shape.top_k), stream,
        )  # fmt: skip
        where = torch.zeros(num_pairs, dtype=torch.uint8, device=device)
        combined = CombinedLayer(
            outputs=outputs.data_ptr(), weights=weights.data_ptr(), where=where.data_ptr(), from_cpu=0,
            num_tokens=num_tokens, top_k=shape.top_k, hidden_size=shape.hidden, hidden=hidden.data_ptr(),
        )  # fmt: skip
        native.combine(combined, stream)

    def server(self, pool: ops.ThreadPool, store: _core.ExpertStore) -> StepServer:
        """The CPU side, which computes a step's misses."""
        return self._native.step_server(self.mailbox, pool, store)


def _filled(
    resident: Sequence[Sequence[Tensor | None]], shape: MoeShape, device: torch.device
) -> _FixedSlots:
    kinds = (layout for layouts in layouts_of(shape) for layout in layouts.kinds)
    stride = _core.slot_stride(max(layout.bytes for layout in kinds))
    count = sum(expert is not None for layer in resident for expert in layer)
    slots = torch.empty((max(count, 1), stride), dtype=torch.uint8, device=device)
    table = np.full((shape.num_layers, shape.num_experts), -1, np.int32)
    slot = 0
    for layer, experts in enumerate(resident):
        for number, expert in enumerate(experts):
            if expert is None:
                continue
            slots[slot, : expert.numel()].copy_(expert)
            table[layer, number] = slot
            slot += 1
    return _FixedSlots(slots, table, torch.from_numpy(table).to(device), shape.top_k)
