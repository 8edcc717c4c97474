"""Routed experts on a CUDA device with a fixed placement: those in slots run there, all others on the CPU.

For measurements and GPU tests: nothing is uploaded while it runs. Decode steps are those of `TableLayers`; `server` is
the CPU's side of them. docs/gpu-status.md says what of this has run on which GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.device.layouts import (
    I32,
    Grouping,
    by_expert,
    layouts_of,
    stream_of,
)
from twofold.device.table_layers import TableLayers
from twofold.experts.moe import MoeShape
from twofold.weights.weight_format import WeightMatrix


@dataclass(frozen=True)
class _FixedSlots:
    """What `TableLayers` asks of slots and store: slots that never change, and a store that nothing is read from."""

    slots: Tensor
    """u8 [slots][stride]."""
    host_table: I32
    """[layers][experts] the slot, -1: in none."""
    table: Tensor
    """The same on the device."""
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

    def offset(self, layer: int) -> int:
        return 0

    def stride(self, layer: int) -> int:
        return 0


class DeviceExperts(TableLayers):
    """`TableLayers` over slots that are filled once."""

    def __init__(
        self,
        module: Any,
        resident: Sequence[Sequence[Tensor | None]],
        shape: MoeShape,
        max_tokens: int,
        hand_over: str = "kernels",
        watchdog_s: float = 5.0,
    ) -> None:
        """Put experts into slots.

        Args:
            module: twofold._cuda, or what stands in for it.
            resident: [layers][experts] the expert's panels as uint8 on the CPU, None: runs on the CPU.
            max_tokens: of a decode step, at most 32.
        """
        device = torch.device("cpu" if module.host_addressable else "cuda")
        self._fixed = _filled(module, resident, shape, device)
        super().__init__(
            module, self._fixed, self._fixed, shape, device,
            max_tokens=max_tokens, hand_over=hand_over, watchdog_s=watchdog_s,
        )  # fmt: skip

    def prefill(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """A layer of a prefill chunk, all of whose experts must be resident; waits for the routing.

        Raises:
            KernelError: an expert is not resident.
        """
        module, shape, device, layout = self._module, self._shape, self._device, self._layouts[moe_layer]
        num_tokens, num_pairs, stream = len(normed), ids.numel(), stream_of(self._device)
        experts, begin, pairs = by_expert(ids.cpu().numpy())
        slots = self._fixed.host_table[moe_layer][experts].astype(np.int64)
        if (slots < 0).any():
            raise KernelError(f"layer {moe_layer}: prefill needs experts that are in no slot")
        grouping = Grouping(module, len(experts), num_pairs, device)
        grouping.fill(self._fixed.slot_base + slots * self._fixed.slot_stride, begin, pairs)
        tile_tokens = module.tile_tokens_for(num_pairs, len(experts))
        tiles = torch.from_numpy(module.tile_groups(begin, tile_tokens)).to(device)
        intermediate = torch.empty(layout.intermediate_bytes(num_pairs), dtype=torch.uint8, device=device)
        outputs = torch.empty((num_pairs, shape.hidden), device=device)
        gate_up = torch.empty((num_pairs, 2 * shape.intermediate), device=device)
        buffers = module.ExpertBuffers(
            self._encoded.data_ptr(), intermediate.data_ptr(), outputs.data_ptr(), gate_up.data_ptr()
        )
        module.prefill_experts(
            layout, grouping.groups, buffers, tiles.data_ptr(), len(tiles), tile_tokens, normed.data_ptr(),
            num_tokens, shape.top_k, stream,
        )  # fmt: skip
        where = torch.zeros(num_pairs, dtype=torch.uint8, device=device)
        module.combine(
            outputs.data_ptr(), weights.data_ptr(), where.data_ptr(), 0, num_tokens, shape.top_k, shape.hidden,
            hidden.data_ptr(), stream,
        )  # fmt: skip

    def server(self, team: object, store: object) -> Any:
        """The CPU's side: its `serve(step, limit_s)` computes a step's misses and returns {done, layer, text}."""
        return self._module.StepServer(self.mailbox, team, store)


def _filled(
    module: Any, resident: Sequence[Sequence[Tensor | None]], shape: MoeShape, device: torch.device
) -> _FixedSlots:
    stride = _core.slot_stride(max(layout.bytes for layout in layouts_of(module, shape)))
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


def pack_expert(gate: WeightMatrix, up: WeightMatrix, down: WeightMatrix) -> Tensor:
    """An expert's panels, one after the other, as slots hold them: uint8 on the CPU."""
    return torch.from_numpy(np.concatenate([_core.pack_panels(matrix) for matrix in (gate, up, down)]))


def make_host_store(
    team: ops.ThreadTeam, layers: Sequence[Sequence[tuple[WeightMatrix, WeightMatrix, WeightMatrix]]]
) -> _core.ExpertStore:
    """The experts (gate, up, down) of all layers in the CPU's store."""
    formats = [(gate.format, up.format, down.format) for gate, up, down in (layer[0] for layer in layers)]
    gate = layers[0][0][0]
    store = _core.ExpertStore(len(layers[0]), gate.columns, gate.rows, formats)
    for layer, experts in enumerate(layers):
        store.put(team, layer, 0, list(experts))
    return store


def devices() -> tuple[list[dict[str, Any]], str]:
    """What the CUDA module sees, and why it sees nothing where it does not."""
    try:
        cuda: Any = importlib.import_module("twofold._cuda")
    except ImportError:
        return [], "this build has no CUDA module"
    return cuda.devices(), cuda.why_no_device()
