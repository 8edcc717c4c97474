"""Times single things on a real or played device, for calibration: copies, layers of resident experts, join, hand-over.

`module` is `twofold._cuda` or what tests put in its place. Experts are random bytes in slots of their own; nothing of a
model, a cache or a policy is here. On CUDA kernels are timed as decode runs them, in a replayed graph; a device whose
memory is the host's is timed by the host's clock.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.device.calibration import LINK_BYTES, PREFILL_TOKENS, Routing
from twofold.device.layouts import Grouping, by_expert, shared_bytes, stream_of
from twofold.device.placed_layers import DECODE_TOKENS
from twofold.experts.moe import MoeShape

_CALLS: Final = 8
"""Of one replay, each on other experts: in use no layer's experts are in a cache from the call before."""
_SLOT_BYTES: Final = 4 << 30
_MOVED_BYTES: Final = 256 << 20
"""Of one batch beside something else: long beside the pause until the next one begins."""


@dataclass
class CopiedMeanwhile:
    """What the background copies moved, known once they have ended."""

    gbps: float = 0.0


@dataclass(frozen=True)
class _Call:
    """One layer's grouping and buffers, ready to launch."""

    num_tokens: int
    grouping: Grouping
    tiles: Tensor
    tile_tokens: int


class _Replay:
    """A captured run, timed by events."""

    def __init__(self, graph: torch.cuda.CUDAGraph, run: Callable[[], object], calls: int) -> None:
        self._graph, self._calls = graph, calls
        self._run = run  # owns what the graph reads
        event: Any = torch.cuda.Event
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def us(self) -> float:
        """Microseconds of one call."""
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e3 / self._calls


class ModuleProbe:
    """A `DeviceProbe` of device 0 of a module with experts of one shape."""

    def __init__(self, module: Any, shape: MoeShape, most_tokens: int | None = None, seed: int = 0) -> None:
        """Fill slots with random experts, for layers of at most `most_tokens` tokens (default: what the device serves).

        Raises:
            CapacityError, KernelError: the device has no room, or failed.
        """
        gate, _, down = (shape.format.split("/") * 3)[:3]
        self._module, self._shape = module, shape
        self._layout = module.ExpertLayout(gate, down, shape.hidden, shape.intermediate)
        self.expert_bytes = int(self._layout.bytes)
        self._opened = module.open_device(0)
        facts = self._opened.facts()
        self.name, self.memory_bytes = str(facts["name"]), int(facts["total_bytes"])
        self._played = bool(self._opened.host_addressable)
        self._device = torch.device("cpu" if self._played else "cuda")
        if most_tokens is None:
            # f32 has no kernel for prefill, and a played device is no measure of one.
            most_tokens = DECODE_TOKENS if self._played or "f32" in (gate, down) else PREFILL_TOKENS[-1]
        self.most_tokens = most_tokens
        stride = _core.slot_stride(self.expert_bytes)
        budget = min(_SLOT_BYTES, int(facts["free_bytes"]) // 4)
        self._num_slots = max(1, min(shape.num_experts * shape.num_layers, budget // stride))
        generator = torch.Generator(self._device).manual_seed(seed)
        # Bytes below 0x3c are small floats in every format, whichever of them are scales.
        self._slots = torch.randint(
            0, 0x3C, (self._num_slots, stride), dtype=torch.uint8, device=self._device, generator=generator
        )
        self._normed = torch.randn(
            most_tokens, shape.hidden, device=self._device, generator=generator
        ).bfloat16()
        pairs = most_tokens * shape.top_k
        self._encoded = self._bytes(self._layout.encoded_bytes(most_tokens))
        self._intermediate = self._bytes(self._layout.intermediate_bytes(pairs))
        self._outputs = torch.zeros((pairs, shape.hidden), device=self._device)
        self._gate_up = torch.zeros((pairs, 2 * shape.intermediate), device=self._device)
        self._buffers = module.ExpertBuffers(
            self._encoded.data_ptr(), self._intermediate.data_ptr(), self._outputs.data_ptr(),
            self._gate_up.data_ptr(),
        )  # fmt: skip
        self._next = 0
        self._runs: dict[Routing | None, Callable[[], float]] = {}

    def copy_us(self, num_bytes: int) -> float:
        """See `DeviceProbe`."""
        return float(self._link.copies_us(num_bytes, 1))

    def routed_us(self, routing: Routing) -> float:
        """See `DeviceProbe`."""
        if routing not in self._runs:
            calls = [self._call(routing) for _ in range(_CALLS)]

            def launch_all() -> None:
                for call in calls:
                    self._launch(call)

            self._runs[routing] = self._timer(launch_all, _CALLS)
        return self._runs[routing]()

    def join_us(self) -> float:
        """See `DeviceProbe`."""
        if None not in self._runs:
            top_k, hidden = self._shape.top_k, self._shape.hidden
            weights = torch.full((1, top_k), 1.0 / top_k, device=self._device)
            where = torch.zeros(top_k, dtype=torch.uint8, device=self._device)
            where[-1] = 1  # one of them was the CPU's
            from_cpu, out = (torch.zeros((1, hidden), device=self._device) for _ in range(2))

            def launch() -> None:
                for _ in range(_CALLS):
                    self._module.combine(
                        self._outputs.data_ptr(), weights.data_ptr(), where.data_ptr(), from_cpu.data_ptr(), 1,
                        top_k, hidden, out.data_ptr(), stream_of(self._device),
                    )  # fmt: skip

            self._runs[None] = self._timer(launch, _CALLS)
        return self._runs[None]()

    def hand_over_us(self) -> float:
        """The way that decode would choose. See `DeviceProbe`."""
        found = self._module.probe_hand_overs(self._shape.hidden)
        times = {probe["kind"]: float(probe["us"]) for probe in found["probes"] if probe["works"]}
        return times[found["kind"]]

    @contextmanager
    def copying(self, num_bytes: int) -> Iterator[CopiedMeanwhile]:
        """See `DeviceProbe`; the rate is by the host's clock."""
        link, stop, copied = self._link, threading.Event(), CopiedMeanwhile()
        moved = [0]

        batch = 1 if self._played else max(1, _MOVED_BYTES // num_bytes)

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
    def _link(self) -> Any:
        return self._module.LinkProbe(self._opened, max(LINK_BYTES[-1], self.expert_bytes))

    def _call(self, routing: Routing) -> _Call:
        """The routing on the next experts: sorted by expert, as the host's and the device's placement leave it."""
        ids = np.array(routing.ids, np.int32)
        experts, begin, pairs = by_expert(ids)
        slots = (self._next + np.arange(len(experts), dtype=np.int64)) % self._num_slots
        self._next = (self._next + len(experts)) % self._num_slots
        # Room for as many groups as the device might place: decode's launches are as large as that.
        grouping = Grouping(self._module, min(ids.size, self._shape.num_experts), ids.size, self._device)
        grouping.fill(self._slots.data_ptr() + slots * self._slots.stride(0), begin, pairs)
        tile_tokens = int(self._module.tile_tokens_for(ids.size, len(experts)))
        tiles = torch.from_numpy(np.array(self._module.tile_groups(begin, tile_tokens))).to(self._device)
        return _Call(len(ids), grouping, tiles, tile_tokens)

    def _launch(self, call: _Call) -> None:
        groups = call.grouping.groups
        stream, normed, top_k = stream_of(self._device), self._normed.data_ptr(), self._shape.top_k
        if call.num_tokens > DECODE_TOKENS:
            self._module.prefill_experts(
                self._layout, groups, self._buffers, call.tiles.data_ptr(), len(call.tiles), call.tile_tokens,
                normed, call.num_tokens, top_k, stream,
            )  # fmt: skip
            return
        self._module.encode(
            self._layout.activations, normed, call.num_tokens, self._shape.hidden, self._encoded.data_ptr(), stream
        )  # fmt: skip
        self._module.decode_experts(
            self._layout, groups, self._buffers, call.num_tokens, top_k, self._shape.num_experts,
            shared_bytes(self._device), stream,
        )  # fmt: skip

    def _timer(self, run: Callable[[], object], calls: int) -> Callable[[], float]:
        """What times one of the calls that `run` makes."""
        run()
        if self._played:

            def by_host() -> float:
                began = time.perf_counter()
                run()
                return (time.perf_counter() - began) * 1e6 / calls

            return by_host
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return _Replay(graph, run, calls).us

    def _bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)
