"""Routed experts of a table step: the device places every layer itself, from the slot tables as they were published.

Residents run from their slots, misses go through the mailbox to the CPU team (the host's part is `TableStep`, native),
or are read from the host's memory where the cost model says that this is quicker. Free of host synchronisation, so that
a graph can hold it. What has run on which GPU says docs/gpu-status.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twofold.api.errors import ConfigError
from twofold.device.layouts import (
    Grouping,
    SlotSource,
    StoreLayout,
    layouts_of,
    shared_bytes,
    stream_of,
)
from twofold.experts.moe import MoeShape

HAND_OVERS: Final = ("kernels", "stream-memory", "host-function")
_log = logging.getLogger(__name__)


class TableLayers:
    """Implements `model.DeviceMoe` for decode steps of at most `max_tokens` rows."""

    def __init__(
        self,
        module: Any,
        slots: SlotSource,
        store: StoreLayout,
        shape: MoeShape,
        device: torch.device,
        *,
        max_tokens: int = 32,
        hand_over: str = "",
        watchdog_s: float = 5.0,
    ) -> None:
        """Take buffers for a step.

        Args:
            module: twofold._cuda, or what stands in for it.
            slots: the module's accelerator; store: where it takes experts from.
            hand_over: one of HAND_OVERS; "": whichever a probe finds the fastest.
            watchdog_s: how long a layer waits for the CPU before the step is given up.

        Raises:
            ConfigError: the device has no kernels for the formats.
            KernelError, MemoryError: the device failed, or has no room.
        """
        self._module, self._slots, self._shape, self._device = module, slots, shape, device
        self._max_tokens, self._watchdog_s = max_tokens, watchdog_s
        self._posting = True
        self._layouts = layouts_of(module, shape)
        num_pairs = max_tokens * shape.top_k

        def empty(size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._step = empty(1, torch.int32)
        self._num_on_cpu = empty(shape.num_layers, torch.int32)
        self._where = empty((shape.num_layers, num_pairs), torch.uint8)
        self._grouping = Grouping(module, min(num_pairs, shape.num_experts), num_pairs, device)
        layouts = self._layouts
        self._encoded = empty(max(layout.encoded_bytes(max_tokens) for layout in layouts), torch.uint8)
        self._intermediate = empty(
            max(layout.intermediate_bytes(num_pairs) for layout in layouts), torch.uint8
        )
        self._outputs = empty((num_pairs, shape.hidden), torch.float32)
        self._buffers = module.ExpertBuffers(
            self._encoded.data_ptr(), self._intermediate.data_ptr(), self._outputs.data_ptr()
        )
        self._split = empty((shape.top_k + 1) ** 2, torch.uint8)
        self._store = [(store.offset(layer), store.stride(layer)) for layer in range(shape.num_layers)]
        self.mailbox = module.DeviceMailbox(shape.num_layers, max_tokens, shape.top_k, shape.hidden)
        self._shared_bytes = shared_bytes(device)
        self.hand_over = hand_over or self._choose_hand_over(device)
        self._number = 0

    def begin_step(self) -> None:
        """The first thing of a decode step, captured or not."""
        self._module.begin_step(self._step.data_ptr(), stream_of(self._device))

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """See `model.DeviceMoe.forward`: a decode step's layer."""
        module, shape, stream = self._module, self._shape, stream_of(self._device)
        layout, (store_offset, store_stride) = self._layouts[moe_layer], self._store[moe_layer]
        slots, groups, num_tokens = self._slots, self._grouping.groups, len(normed)
        where, on_cpu = self._where[moe_layer], self._num_on_cpu[moe_layer]
        table = slots.slot_table + 4 * shape.num_experts * moe_layer
        store = slots.store_base + store_offset if slots.store_base else 0
        module.place(
            ids.data_ptr(), weights.data_ptr(), normed.data_ptr(), num_tokens, moe_layer, table,
            self._split.data_ptr(), slots.slot_base, slots.slot_stride, store, store_stride,
            shape.num_experts, groups, where.data_ptr(), on_cpu.data_ptr(), shape.num_layers,
            self._max_tokens, shape.top_k, shape.hidden, self.mailbox.address if self._posting else 0,
            self._step.data_ptr(), stream,
        )  # fmt: skip
        module.encode(
            layout.activations, normed.data_ptr(), num_tokens, shape.hidden, self._encoded.data_ptr(), stream
        )
        module.decode_experts(
            layout, groups, self._buffers, num_tokens, shape.top_k, shape.num_experts, self._shared_bytes,
            stream,
        )  # fmt: skip
        joined = 0
        if self._posting:
            self.mailbox.wait(
                self.hand_over, moe_layer, self._step.data_ptr(), on_cpu.data_ptr(), self._watchdog_s, stream
            )
            joined = self.mailbox.joined_ns(moe_layer)
        module.combine(
            self._outputs.data_ptr(), weights.data_ptr(), where.data_ptr(), self.mailbox.results, num_tokens,
            shape.top_k, shape.hidden, hidden.data_ptr(), stream, joined,
        )  # fmt: skip

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps inside neither post nor wait, and leave out what is on the CPU: nobody serves them."""
        self._posting = False
        try:
            yield
        finally:
            self._posting = True

    def next_number(self) -> int:
        """What the device will call the step that is launched next."""
        self._number = self._number % 0xFFFFFFFF + 1
        return self._number

    def resynchronise(self) -> None:
        """The device has run steps that were not asked for by next_number, or not run some; it is idle now."""
        self._number = int(self._step.item()) & 0xFFFFFFFF

    def refresh_split(self) -> None:
        """Bring what the cost model says of misses to the device; before a step."""
        table = np.array(self._slots.split_table(), np.uint8)
        self._split.copy_(torch.from_numpy(table))

    def _choose_hand_over(self, device: torch.device) -> str:
        if device.type != "cuda":
            return HAND_OVERS[0]  # a fake device has no times worth comparing
        probed = self._module.probe_hand_overs(self._shape.hidden)
        _log.info("hand-over: %s", probed["reason"])
        if not probed["kind"]:
            raise ConfigError(f"the device cannot hand layers over to the CPU ({probed['reason']})")
        return str(probed["kind"])
