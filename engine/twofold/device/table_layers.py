"""Routed experts of a table step: the device places every layer itself, from the published slot tables.

Resident experts run from their slots. Misses go through the mailbox to the CPU pool (the host side is `TableStep`,
native), or are read from host memory where the cost model predicts that to be faster. There is no host synchronisation,
so that a graph can hold the step. docs/explanation/gpu-status.md lists which GPUs this has run on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold._core import Placement
from twofold._core.device import (
    CombinedLayer,
    DecodeShape,
    EncodedRows,
    ExpertBuffers,
    ExpertLayout,
    MailboxShape,
    PlacedLayer,
    PlacementTables,
    RoutedLayer,
)
from twofold.blocks.device_step import CachePrior
from twofold.device.adapters.step import AdaptedExperts
from twofold.device.cache_prior import PriorRows
from twofold.device.device import Device
from twofold.device.layouts import Grouping, SlotSource, StoreLayout, layouts_of
from twofold.experts.slot_plan import MoeShape


class TableLayers:
    """Implements `model.DeviceMoe` for decode steps of at most `max_tokens` rows."""

    def __init__(
        self,
        device: Device,
        slots: SlotSource,
        store: StoreLayout,
        shape: MoeShape,
        *,
        max_tokens: int = 32,
        handshake: str = "",
        watchdog_s: float = 5.0,
        look_ahead: bool = False,
        cpu_layers: Collection[int] = (),
        defers: bool = False,
        cache_prior: float = 0.0,
        adapters: bool = False,
    ) -> None:
        """Allocate the buffers of a step.

        Args:
            slots: the device's accelerator; store: host store of the experts.
            handshake: "kernels", "stream-memory" or "host-function"; "": the fastest by a probe.
            watchdog_s: how long a layer waits for the CPU before the step is aborted.
            look_ahead: post the next layer's router scores, so that the host may prefetch its experts.
            cpu_layers: layers whose experts the device neither holds nor reads.
            defers: the host defers experts: every layer waits for the CPU's answer and adds the rows of all tokens.
            cache_prior: routing bias towards experts that were in slots at the start of the step.
            adapters: whether rows may use adapters.

        Raises:
            ConfigError: the device has no kernels for the formats.
            KernelError, MemoryError: the device failed, or lacks memory.
        """
        self._adapted: AdaptedExperts | None = None
        self._device, self._native, self._slots, self._shape = device, device.native, slots, shape
        self._watchdog_s = watchdog_s
        self._posting = True
        self.look_ahead: Callable[[Tensor], None] | None = self._keep_look_ahead if look_ahead else None
        self._ahead: Tensor | None = None
        self._layouts = layouts_of(shape)
        self._prior_rows = PriorRows(shape, max_tokens, cache_prior, device.torch_device)
        num_pairs = max_tokens * shape.top_k

        def empty(size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device.torch_device)

        self._step = empty(1, torch.int32)
        self._num_on_cpu = empty(shape.num_layers, torch.int32)
        self._where = empty((shape.num_layers, num_pairs), torch.uint8)
        num_kinds = max((len(layouts.kinds) for layouts in self._layouts), default=1)
        self._grouping = Grouping(
            min(num_pairs, shape.num_experts), num_pairs, device.torch_device, num_kinds=num_kinds
        )
        kinds = [layout for layouts in self._layouts for layout in layouts.kinds]
        encoded = max((layout.encoded_bytes(max_tokens) for layout in kinds), default=0)
        intermediate = max((layout.intermediate_bytes(num_pairs) for layout in kinds), default=0)
        self._encoded, self._intermediate = empty(encoded, torch.uint8), empty(intermediate, torch.uint8)
        self._outputs = empty((num_pairs, shape.hidden), torch.float32)
        self._parts = empty((num_pairs if adapters else 0, 2, shape.intermediate), torch.float32)
        self._all_rows = empty(max_tokens, torch.uint8).fill_(int(Placement.CPU)) if defers else None
        self._always = empty(1, torch.int32).fill_(1)
        self._split = empty((shape.top_k + 1) ** 2, torch.uint8)
        self._prices = empty(len(slots.read_prices()), torch.int32)
        self._offsets = empty((shape.num_layers, shape.num_experts), torch.int64)
        self._kinds = empty((shape.num_layers, shape.num_experts), torch.uint8)
        self._tables = [
            self._tables_of(layer, store, reads=layer not in cpu_layers) for layer in range(shape.num_layers)
        ]
        self._room = MailboxShape(
            num_layers=shape.num_layers,
            max_tokens=max_tokens,
            top_k=shape.top_k,
            hidden=shape.hidden,
            num_ahead=shape.num_experts if look_ahead else 0,
        )
        self.mailbox = self._native.mailbox(self._room)
        self._shared_bytes = device.shared_bytes
        # A dense model hands nothing over.
        self.handshake = handshake or (device.handshake(shape.hidden) if shape.num_layers else "kernels")
        self._number = 0

    def begin_step(self, adapted: AdaptedExperts | None = None) -> None:
        """Start of a decode step, captured or not. adapted: adapters of its rows."""
        self._adapted = adapted
        self._native.begin_step(self._step, self._device.stream())

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """See `model.DeviceMoe.forward`: one layer of a decode step."""
        native, shape, stream = self._native, self._shape, self._device.stream()
        num_tokens = len(normed)
        where, on_cpu = self._where[moe_layer], self._num_on_cpu[moe_layer]
        ahead, self._ahead = self._ahead, None
        routed = RoutedLayer(
            ids=ids, weights=weights, normed=normed, num_tokens=num_tokens, layer=moe_layer, ahead=ahead
        )
        placed = PlacedLayer(groups=self._grouping.groups, where=where, num_on_cpu=on_cpu)
        mailbox = self.mailbox.address if self._posting else None
        native.place(
            routed,
            self._tables[moe_layer],
            placed,
            self._room,
            mailbox=mailbox,
            step=self._step,
            stream=stream,
        )
        adapted, parts = self._adapted, self._parts
        if adapted is not None:
            adapted.before(moe_layer, normed, ids, where, parts)
        self._compute(self._layouts[moe_layer].kinds, normed)
        if adapted is not None:
            adapted.after(moe_layer, parts, ids, where, self._outputs)
        add = functools.partial(self._add, weights, hidden)
        results = self.mailbox.results
        if not self._posting:
            return add(where, shape.top_k, results)
        self.mailbox.wait(
            kind=self.handshake,
            layer=moe_layer,
            step=self._step,
            num_on_cpu=on_cpu if self._all_rows is None else self._always,
            limit_s=self._watchdog_s,
            stream=stream,
        )
        joined_ns = self.mailbox.joined_ns(moe_layer)
        if self._all_rows is None:
            return add(where, shape.top_k, results, joined_ns)
        add(where, shape.top_k)
        # also rows with no CPU expert in this layer: rows deferred from the previous layer join here
        return add(self._all_rows, 1, results, joined_ns)

    def _compute(self, kinds: Sequence[ExpertLayout], normed: Tensor) -> None:
        """Launch the placed experts, each kind with its own kernels."""
        shape, stream, num_tokens = self._shape, self._device.stream(), len(normed)
        bounds = DecodeShape(
            num_tokens=num_tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            shared_bytes=self._shared_bytes,
        )
        buffers = ExpertBuffers(
            encoded=self._encoded,
            intermediate=self._intermediate,
            outputs=self._outputs,
            adapted=None if self._adapted is None else self._parts,
        )
        encoded_as = ""
        for layout, groups in zip(kinds, self._grouping.kinds, strict=False):
            if layout.activations != encoded_as:
                encoded_as = layout.activations
                rows = EncodedRows(
                    kind=encoded_as,
                    rows=normed,
                    num_tokens=num_tokens,
                    columns=shape.hidden,
                    out=self._encoded,
                )
                self._native.encode(rows, stream)
            self._native.decode_experts(layout, groups, buffers, bounds, stream)

    def _add(
        self,
        weights: Tensor,
        hidden: Tensor,
        where: Tensor,
        top_k: int,
        from_cpu: int = 0,
        joined_ns: int = 0,
    ) -> None:
        """Add the device's outputs, and the CPU's where `where` says so, to `hidden`."""
        layer = CombinedLayer(
            outputs=self._outputs,
            weights=weights,
            where=where,
            from_cpu=from_cpu,
            num_tokens=len(hidden),
            top_k=top_k,
            hidden_size=self._shape.hidden,
            hidden=hidden,
            joined_ns=joined_ns,
        )
        self._native.combine(layer, self._device.stream())

    def cache_prior(self, moe_layer: int, num_tokens: int) -> CachePrior | None:
        return self._prior_rows.of_layer(moe_layer, num_tokens)

    def fill_cache_prior(self, states: npt.NDArray[np.uint8], generated: Sequence[bool]) -> None:
        """Call before a step. states: [layers, experts] as in `MoeRuntime.placement`; generated: rows being decoded."""
        self._prior_rows.fill(states, generated)

    def _keep_look_ahead(self, logits: Tensor) -> None:
        """See `model.DeviceMoe.look_ahead`: posted with the next layer."""
        self._ahead = logits

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps inside neither post nor wait, and leave out CPU experts, because their CPU part is not served."""
        self._posting = False
        try:
            yield
        finally:
            self._posting = True

    def next_number(self) -> int:
        """The device's number of the next step to be launched."""
        self._number = self._number % 0xFFFFFFFF + 1
        return self._number

    def resynchronise(self) -> None:
        """Read the step number from the idle device, after steps that next_number did not number, or skipped steps."""
        self._number = int(self._step.item()) & 0xFFFFFFFF

    def refresh_split(self) -> None:
        """Copy the cost model's split of misses to the device; call before a step."""
        table = np.array(self._slots.split_table(), np.uint8)
        self._split.copy_(torch.from_numpy(table))
        prices = np.array(self._slots.read_prices(), np.uint32)
        self._prices.copy_(torch.from_numpy(prices.view(np.int32)))

    def _tables_of(self, layer: int, store: StoreLayout, *, reads: bool) -> PlacementTables:
        slots, num_experts, layouts = self._slots, self._shape.num_experts, self._layouts[layer]
        reads = reads and slots.store_base != 0
        if reads:
            self._offsets[layer].copy_(torch.from_numpy(store.offsets(layer)))
        self._kinds[layer].copy_(torch.from_numpy(layouts.kind_of))
        return PlacementTables(
            slots=slots.slot_table + 4 * num_experts * layer,
            split=self._split,
            slot_base=slots.slot_base,
            slot_stride=slots.slot_stride,
            store_base=slots.store_base if reads else 0,
            store_offsets=self._offsets[layer],
            num_experts=num_experts,
            prices=self._prices,
            kinds=self._kinds[layer],
            num_kinds=len(layouts.kinds),
        )
