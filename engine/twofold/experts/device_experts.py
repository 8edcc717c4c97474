"""Routed experts on a CUDA device with a fixed placement: those in slots run there, all others on the CPU.

For measurements and GPU tests: nothing is uploaded while it runs. A decode step, eager or captured, hands the
CPU's share over through the mailbox and waits for it; `server` is the CPU's side. docs/gpu-status.md says what of this
has run on which GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofold import _core, ops
from twofold.errors import KernelError
from twofold.weight_format import WeightMatrix

HAND_OVERS = ("kernels", "stream-memory", "host-function")


class DeviceExperts:
    """Implements `model.DeviceMoe` for layers of one shape and format."""

    def __init__(
        self,
        resident: Sequence[Sequence[Tensor | None]],
        layout: tuple[str, str, int, int],
        top_k: int,
        max_tokens: int,
        hand_over: str = "kernels",
        watchdog_s: float = 5.0,
    ) -> None:
        """Put experts into slots.

        Args:
            resident: [layers][experts] the expert's panels as uint8 on the CPU, None: runs on the CPU.
            layout: (format of gate and up, format of down, hidden, intermediate).
            max_tokens: of a decode step, at most 32.
        """
        self._cuda: Any = importlib.import_module("twofold._cuda")
        self._played = bool(self._cuda.host_addressable)
        self._device = torch.device("cpu" if self._played else "cuda")
        self._layout = self._cuda.ExpertLayout(*layout)
        self.expert_bytes = int(self._layout.bytes)
        self._hidden, self._top_k, self._max_tokens = layout[2], top_k, max_tokens
        self._num_layers, self._num_experts = len(resident), len(resident[0])
        self._hand_over, self._watchdog_s = hand_over, watchdog_s
        self._posting = True
        self._fill_slots(resident)
        num_pairs = max_tokens * top_k
        groups = min(num_pairs, self._num_experts)
        self.step = self._empty(1, torch.int32)
        self._num_on_cpu = self._empty(self._num_layers, torch.int32)
        self.where = self._empty((self._num_layers, num_pairs), torch.uint8)
        self._groups = self._make_groups(groups, num_pairs)
        self._buffers = self._make_buffers(max_tokens)
        mailbox = (self._num_layers, max_tokens, top_k, self._hidden)
        self.mailbox = self._cuda.DeviceMailbox(*mailbox)
        self._shared_bytes = 48 * 1024
        if not self._played:
            properties = torch.cuda.get_device_properties(0)
            self._shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", self._shared_bytes))

    def begin_step(self) -> None:
        """The first thing of a decode step, captured or not."""
        self._cuda.begin_step(self.step.data_ptr(), self._stream())

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """See `model.DeviceMoe.forward`: a decode step's layer."""
        num_tokens, stream = len(normed), self._stream()
        where, on_cpu = self.where[moe_layer], self._num_on_cpu[moe_layer]
        self._cuda.place(
            ids.data_ptr(), weights.data_ptr(), normed.data_ptr(), num_tokens, moe_layer,
            self._tables[moe_layer].data_ptr(), 0, self._slots.data_ptr(), self._slots.stride(0), 0, 0,
            self._num_experts, self._groups[0], where.data_ptr(), on_cpu.data_ptr(), self._num_layers,
            self._max_tokens, self._top_k, self._hidden, self.mailbox.address if self._posting else 0,
            self.step.data_ptr(), stream,
        )  # fmt: skip
        self._cuda.encode(
            self._layout.activations,
            normed.data_ptr(),
            num_tokens,
            self._hidden,
            self._encoded.data_ptr(),
            stream,
        )
        self._cuda.decode_experts(
            self._layout, self._groups[0], self._buffers, num_tokens, self._top_k, self._num_experts,
            self._shared_bytes, stream,
        )  # fmt: skip
        if self._posting:
            self.mailbox.wait(
                self._hand_over, moe_layer, self.step.data_ptr(), on_cpu.data_ptr(), self._watchdog_s, stream
            )
        self._cuda.combine(
            self._outputs.data_ptr(), weights.data_ptr(), where.data_ptr(), self.mailbox.results, num_tokens,
            self._top_k, self._hidden, hidden.data_ptr(), stream,
        )  # fmt: skip

    def prefill(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """A layer of a prefill chunk, all of whose experts must be resident; waits for the routing.

        Raises:
            KernelError: an expert is not resident.
        """
        num_tokens, pairs = len(normed), ids.numel()
        flat = ids.flatten().cpu().numpy()
        order = np.argsort(flat, kind="stable").astype(np.int32)
        experts, counts = np.unique(flat, return_counts=True)
        slots = self._host_tables[moe_layer][experts]
        if (slots < 0).any():
            raise KernelError(f"layer {moe_layer}: prefill needs experts that are in no slot")
        begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        addresses = (self._slots.data_ptr() + slots.astype(np.int64) * self._slots.stride(0)).astype(np.int64)
        tile_tokens = self._cuda.tile_tokens_for(pairs, len(experts))
        tiles = torch.from_numpy(self._cuda.tile_groups(begin, tile_tokens)).to(self._device)
        if self._prefill_tokens < num_tokens:
            self._make_prefill_buffers(num_tokens)
        groups, held = self._make_groups(len(experts), pairs)
        for tensor, values in zip(
            held, (np.array([len(experts)], np.int32), addresses, begin, order), strict=True
        ):
            tensor[: len(values)].copy_(torch.from_numpy(values))
        self._cuda.prefill_experts(
            self._layout, groups, self._prefill_buffers, tiles.data_ptr(), len(tiles), tile_tokens,
            normed.data_ptr(), num_tokens, self._top_k, self._stream(),
        )  # fmt: skip
        where = torch.zeros(pairs, dtype=torch.uint8, device=self._device)
        self._cuda.combine(
            self._prefill_outputs.data_ptr(), weights.data_ptr(), where.data_ptr(), 0, num_tokens, self._top_k,
            self._hidden, hidden.data_ptr(), self._stream(),
        )  # fmt: skip

    def posting(self, on: bool) -> None:
        """Off: steps neither post nor wait, and leave out what is on the CPU (for what nobody serves)."""
        self._posting = on

    def server(self, team: object, store: object) -> Any:
        """The CPU's side: its `serve(step, limit_s)` computes a step's misses and returns {done, layer, text}."""
        return self._cuda.StepServer(self.mailbox, team, store)

    _prefill_tokens = 0

    def _fill_slots(self, resident: Sequence[Sequence[Tensor | None]]) -> None:
        count = sum(expert is not None for layer in resident for expert in layer)
        stride = -(-self._layout.bytes // 256) * 256
        self._slots = torch.empty((max(count, 1), stride), dtype=torch.uint8, device=self._device)
        tables = np.full((self._num_layers, self._num_experts), -1, np.int32)
        slot = 0
        for layer, experts in enumerate(resident):
            for number, expert in enumerate(experts):
                if expert is None:
                    continue
                self._slots[slot, : expert.numel()].copy_(expert)
                tables[layer, number] = slot
                slot += 1
        self._host_tables = tables
        self._tables = torch.from_numpy(tables).to(self._device)

    def _make_groups(self, capacity: int, num_pairs: int) -> tuple[Any, tuple[Tensor, ...]]:
        held = (
            self._empty(1, torch.int32),
            self._empty(capacity, torch.int64),
            self._empty(capacity + 1, torch.int32),
            self._empty(num_pairs, torch.int32),
        )
        return self._cuda.ExpertGroups(*(tensor.data_ptr() for tensor in held), capacity), held

    def _make_buffers(self, max_tokens: int) -> Any:
        num_pairs = max_tokens * self._top_k
        self._encoded = self._empty(self._layout.encoded_bytes(max_tokens), torch.uint8)
        self._intermediate = self._empty(self._layout.intermediate_bytes(num_pairs), torch.uint8)
        self._outputs = self._empty((num_pairs, self._hidden), torch.float32)
        return self._cuda.ExpertBuffers(
            self._encoded.data_ptr(), self._intermediate.data_ptr(), self._outputs.data_ptr()
        )

    def _make_prefill_buffers(self, num_tokens: int) -> None:
        num_pairs = num_tokens * self._top_k
        rows = self._layout.intermediate_bytes(num_pairs)
        self._prefill_intermediate = self._empty(rows, torch.uint8)
        self._prefill_outputs = self._empty((num_pairs, self._hidden), torch.float32)
        self._gate_up = self._empty(2 * rows, torch.float32)
        self._prefill_tokens = num_tokens
        self._prefill_buffers = self._cuda.ExpertBuffers(
            self._encoded.data_ptr(), self._prefill_intermediate.data_ptr(), self._prefill_outputs.data_ptr(),
            self._gate_up.data_ptr(),
        )  # fmt: skip

    def _stream(self) -> int:
        return 0 if self._played else int(torch.cuda.current_stream().cuda_stream)

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def pack_expert(gate: WeightMatrix, up: WeightMatrix, down: WeightMatrix) -> Tensor:
    """An expert's panels, one after the other, as slots hold them: uint8 on the CPU."""
    parts = [
        _core.kernels.pack(
            np.ascontiguousarray(matrix.data).view(np.uint8).reshape(matrix.rows, -1), matrix.format, matrix.columns,
            matrix.scales,
        )
        for matrix in (gate, up, down)
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate([np.asarray(part).reshape(-1) for part in parts]))


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


def probe_hand_overs(hidden: int) -> dict[str, Any]:
    """Microseconds per layer of each way to hand over on this device, and which one is chosen and why."""
    cuda: Any = importlib.import_module("twofold._cuda")
    probes: dict[str, Any] = cuda.probe_hand_overs(hidden)
    return probes


def devices() -> tuple[list[dict[str, Any]], str]:
    """What the CUDA module sees, and why it sees nothing where it does not."""
    try:
        cuda: Any = importlib.import_module("twofold._cuda")
    except ImportError:
        return [], "this build has no CUDA module"
    return cuda.devices(), cuda.why_no_device()
