"""Times single operations on a device, for calibration: copies, layers of resident experts, join, handshake.

Experts are random bytes in slots of their own, independent of any model, cache or policy. Kernels are timed as decode
runs them, in a replayed graph.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold._core.device import (
    CombinedLayer,
    DecodeShape,
    EncodedRows,
    ExpertBuffers,
    ExpertLayout,
    PrefillRows,
    PrefillTiles,
    tile_groups,
    tile_tokens_for,
)
from twofold.device.backend import LinkProbe
from twofold.device.calibration import LINK_BYTES, Routing
from twofold.device.device import Device
from twofold.device.layouts import Grouping, by_expert
from twofold.device.placed_share import DECODE_TOKENS
from twofold.experts.slot_plan import MoeShape

_CALLS: Final = 8
"""Calls per replay, each on other experts: in real use a layer's experts are not cached from the previous call."""
_SLOT_BYTES: Final = 4 << 30
_MOVED_BYTES: Final = 256 << 20
"""Bytes of one batch of background copies: long compared with the pause before the next batch."""


@dataclass
class CopiedMeanwhile:
    """Bytes moved by the background copies, known once they have finished."""

    gbps: float = 0.0


@dataclass(frozen=True)
class _Call:
    """One layer's grouping and buffers, ready to launch."""

    num_tokens: int
    grouping: Grouping
    tiles: Tensor
    tile_tokens: int


class KernelProbe:
    """A `DeviceProbe` for a device with experts of one shape."""

    def __init__(
        self, device: Device, shape: MoeShape, most_tokens: int | None = None, seed: int = 0
    ) -> None:
        """Fill slots with random experts, for layers of at most `most_tokens` tokens (default: the largest that the
        device serves and that is worth timing).

        Raises:
            CapacityError, KernelError: the device lacks memory, or failed.
        """
        gate, _, down = shape.usual
        self._device, self._native, self._shape = device, device.native, shape
        self._layout = ExpertLayout(
            gate, down, shape.hidden, shape.intermediate, shape.activation, shape.biases
        )
        self.expert_bytes = self._layout.bytes
        facts = self._native.facts()
        self.name, self.memory_bytes = facts["name"], facts["total_bytes"]
        if most_tokens is None:  # f32 has no prefill kernel
            most_tokens = DECODE_TOKENS if "f32" in (gate, down) else device.most_tokens
        self.most_tokens = most_tokens
        stride = _core.slot_stride(self.expert_bytes)
        budget = min(_SLOT_BYTES, facts["free_bytes"] // 4)
        self._num_slots = max(1, min(shape.num_experts * shape.num_layers, budget // stride))
        memory = self._memory = device.torch_device
        generator = torch.Generator(memory).manual_seed(seed)
        # Bytes below 0x3c are small floats in every format, whichever of them are scales.
        self._slots = torch.randint(
            0, 0x3C, (self._num_slots, stride), dtype=torch.uint8, device=memory, generator=generator
        )
        self._normed = torch.randn(most_tokens, shape.hidden, device=memory, generator=generator).bfloat16()
        pairs = most_tokens * shape.top_k
        self._encoded = self._bytes(self._layout.encoded_bytes(most_tokens))
        self._intermediate = self._bytes(self._layout.intermediate_bytes(pairs))
        self._outputs = torch.zeros((pairs, shape.hidden), device=memory)
        self._gate_up = torch.zeros((pairs, 2 * shape.intermediate), device=memory)
        self._buffers = ExpertBuffers(
            encoded=self._encoded,
            intermediate=self._intermediate,
            outputs=self._outputs,
            gate_up=self._gate_up,
        )
        self._next = 0
        self._runs: dict[Routing | None, Callable[[], float]] = {}

    def copy_us(self, num_bytes: int) -> float:
        return self._link.copies_us(num_bytes, 1)

    def routed_us(self, routing: Routing) -> float:
        if routing not in self._runs:
            calls = [self._call(routing) for _ in range(_CALLS)]

            def launch_all() -> None:
                for call in calls:
                    self._launch(call)

            self._runs[routing] = self._timer(launch_all, _CALLS)
        return self._runs[routing]()

    def join_us(self) -> float:
        if None not in self._runs:
            top_k, hidden = self._shape.top_k, self._shape.hidden
            weights = torch.full((1, top_k), 1.0 / top_k, device=self._memory)
            where = torch.zeros(top_k, dtype=torch.uint8, device=self._memory)
            where[-1] = 1  # one pair was computed by the CPU
            from_cpu, out = (torch.zeros((1, hidden), device=self._memory) for _ in range(2))

            def launch() -> None:
                layer = CombinedLayer(
                    outputs=self._outputs,
                    weights=weights,
                    where=where,
                    from_cpu=from_cpu,
                    num_tokens=1,
                    top_k=top_k,
                    hidden_size=hidden,
                    hidden=out,
                )
                for _ in range(_CALLS):
                    self._native.combine(layer, self._device.stream())

            self._runs[None] = self._timer(launch, _CALLS)
        return self._runs[None]()

    def handshake_us(self) -> float:
        """The handshake that decode would choose. See `DeviceProbe`."""
        found = self._native.probe_handshakes(self._shape.hidden)
        times = {probe["kind"]: probe["us"] for probe in found["probes"] if probe["works"]}
        return times[found["kind"]]

    @contextmanager
    def copying(self, num_bytes: int) -> Iterator[CopiedMeanwhile]:
        """See `DeviceProbe`; the rate is measured by the host's clock."""
        link, stop, copied = self._link, threading.Event(), CopiedMeanwhile()
        moved = [0]
        batch = max(1, _MOVED_BYTES // num_bytes)

        def copy() -> None:
            while not stop.is_set():
                link.copies_us(num_bytes, batch, asleep=True)  # without the GIL
                moved[0] += batch * num_bytes

        thread = threading.Thread(target=copy)
        began = time.perf_counter()
        thread.start()
        try:
            yield copied
        finally:
            stop.set()
            thread.join()
            copied.gbps = moved[0] / (time.perf_counter() - began) / 1e9

    @functools.cached_property
    def _link(self) -> LinkProbe:
        return self._native.link_probe(max(LINK_BYTES[-1], self.expert_bytes))

    def _call(self, routing: Routing) -> _Call:
        """The routing applied to the next experts, sorted by expert as in a placed step."""
        ids = np.array(routing.ids, np.int32)
        experts, begin, pairs = by_expert(ids)
        slots = (self._next + np.arange(len(experts), dtype=np.int64)) % self._num_slots
        self._next = (self._next + len(experts)) % self._num_slots
        # Capacity for the largest number of groups the device may place: decode launches are that large.
        grouping = Grouping(min(ids.size, self._shape.num_experts), ids.size, self._memory)
        grouping.fill(self._slots.data_ptr() + slots * self._slots.stride(0), begin, pairs)
        tile_tokens = tile_tokens_for(ids.size, len(experts))
        tiles = torch.from_numpy(tile_groups(begin, tile_tokens)).to(self._memory)
        return _Call(len(ids), grouping, tiles, tile_tokens)

    def _launch(self, call: _Call) -> None:
        groups = call.grouping.groups
        stream, normed, top_k = self._device.stream(), self._normed, self._shape.top_k
        if call.num_tokens > DECODE_TOKENS:
            tiles = PrefillTiles(tiles=call.tiles, count=len(call.tiles), tokens=call.tile_tokens)
            prompt = PrefillRows(x=normed, num_tokens=call.num_tokens, top_k=top_k)
            self._native.prefill_experts(self._layout, groups, self._buffers, tiles, prompt, stream)
            return
        rows = EncodedRows(
            kind=self._layout.activations,
            rows=normed,
            num_tokens=call.num_tokens,
            columns=self._shape.hidden,
            out=self._encoded,
        )
        self._native.encode(rows, stream)
        bounds = DecodeShape(
            num_tokens=call.num_tokens,
            top_k=top_k,
            num_experts=self._shape.num_experts,
            shared_bytes=self._device.shared_bytes,
        )
        self._native.decode_experts(self._layout, groups, self._buffers, bounds, stream)

    def _timer(self, run: Callable[[], object], calls: int) -> Callable[[], float]:
        """A function that times one of the calls that `run` makes."""
        run()
        replay = self._device.graph(run)
        return lambda: self._device.time_us(replay) / calls

    def _bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._memory)
