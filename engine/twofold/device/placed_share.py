"""One device's share of a layer that the host places: its buffers, and the launches of its experts.

Experts run on the device that holds them. Rows of another device's layer are copied here, and the outputs of these
experts back, one row per routed pair: the layer's device adds all outputs in the order in which it adds its own. torch
copies from GPU to GPU directly where the system lets them, else through host memory.
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
from twofold._core.device import (
    DecodeShape,
    EncodedRows,
    ExpertBuffers,
    ExpertGroups,
    ExpertLayout,
    PrefillRows,
    PrefillTiles,
    tile_groups,
    tile_tokens_for,
)
from twofold.api.errors import CapacityError
from twofold.device.adapters.step import AdaptedExperts
from twofold.device.device import Device
from twofold.device.layouts import I32, I64, layouts_of
from twofold.experts.slot_plan import MoeShape
from twofold.weights.weight_format import distinct_formats

_ALIGNMENT: Final = 16  # alignment for read_host
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
    adapted: Tensor
    parcel: Parcel


@dataclass(frozen=True)
class _Launch:
    """Kernel arguments for those experts of a part of a layer that have the same formats."""

    layout: ExpertLayout
    groups: ExpertGroups
    num_groups: int
    tiles: PrefillTiles | None = None
    """None: computed by the decode kernels."""


class PlacedShare:
    """A device's part of each layer. Calls are in order: `open`, `send`, `compute`; its device is active."""

    def __init__(
        self,
        device: Device,
        accelerator: _core.DeviceAccelerator,
        shape: MoeShape,
        index: int = 0,
        *,
        adapters: bool = False,
    ) -> None:
        """Allocate nothing yet: buffers grow with the largest step.

        Args:
            accelerator: expert slots of all devices; index: this device's number among them.
            adapters: whether rows may use adapters.

        Raises:
            ConfigError: the device has no kernels for the formats.
        """
        self.device, self.index = device, index
        self._native, self._accelerator, self._shape = device.native, accelerator, shape
        self._layouts = layouts_of(shape)
        self._tensor_cores = layers_on_tensor_cores(shape)
        self._shared_bytes = device.shared_bytes
        self._room: _Room | None = None
        self._has_adapters, self._is_adapted = adapters, False
        self._many = False
        self._encoded_as = ""
        self._ready: Sequence[_Launch] = ()
        self._awaited: Sequence[_Launch] = ()

    @property
    def outputs(self) -> Tensor:
        """Outputs f32 [pairs, hidden] of the experts that were computed here."""
        assert self._room is not None
        return self._room.outputs

    @property
    def has_work(self) -> bool:
        """Whether experts of the open layer run here."""
        return bool(self._ready or self._awaited)

    def open(self, plan: _core.LayerPlan, layer: int, num_tokens: int) -> Parcel:
        """Begin a layer of `num_tokens` tokens. Returns its parcel, to which the caller may add before `send`.

        Raises:
            CapacityError: the device has no room for the step's buffers.
        """
        parcel = self._room_for(num_tokens).parcel
        parcel.open()
        self._layer, self._num_tokens = layer, num_tokens
        self._many = num_tokens > DECODE_TOKENS and self._tensor_cores[layer]
        parts = plan.ready(self.index), plan.awaited(self.index)
        self._ready, self._awaited = (self._packed(part, parcel) for part in parts)
        return parcel

    def send(self) -> None:
        """Copy the parcel to the device."""
        assert self._room is not None
        self._room.parcel.send(self.device.stream())

    def compute_adapted(self, normed: Tensor, ids: Tensor, where: int, adapted: AdaptedExperts) -> None:
        """`compute` for rows that use adapters. ids: int32 [T, top_k]; where: address of the plan's placements."""
        assert self._room is not None
        parts, outputs = self._room.adapted, self._room.outputs
        adapted.before(self._layer, normed, ids, where, parts)
        self._is_adapted = True
        try:
            self.compute(normed)
        finally:
            self._is_adapted = False
        adapted.after(self._layer, parts, ids, where, outputs)

    def compute(self, normed: Tensor) -> None:
        """Launch this device's experts of rows `normed` bf16 [T, hidden], which are on this device."""
        stream = self.device.stream()
        self._encoded_as = ""
        if not self._many and self.has_work:
            self._encode(normed, (*self._ready, *self._awaited)[0].layout.activations)
        for launch in self._ready:
            self._launch(launch, normed)
        self._accelerator.before_compute(stream, self.index)
        for launch in self._awaited:
            self._launch(launch, normed)
        self._accelerator.after_compute(stream, self.index)

    def _packed(self, part: _core.PlacedGroups, parcel: Parcel) -> list[_Launch]:
        layouts, begin, pairs = self._layouts[self._layer], part.begin, part.pairs
        if len(part) == 0:
            return []
        if len(layouts.kinds) == 1:
            return [self._packed_kind(layouts.kinds[0], part.addresses, begin, pairs, parcel=parcel)]
        launches = []
        kind_of = layouts.kind_of[part.experts]
        for kind in np.unique(kind_of):
            (mine,) = np.nonzero(kind_of == kind)
            ends = np.cumsum(begin[mine + 1] - begin[mine])
            launches.append(
                self._packed_kind(
                    layouts.kinds[kind],
                    part.addresses[mine],
                    np.concatenate([[0], ends]).astype(np.int32),
                    np.concatenate([pairs[begin[group] : begin[group + 1]] for group in mine]),
                    parcel=parcel,
                )
            )
        return launches

    def _packed_kind(
        self, layout: ExpertLayout, addresses: I64, begin: I32, pairs: I32, *, parcel: Parcel
    ) -> _Launch:
        count = len(addresses)
        groups = ExpertGroups(
            num_groups=parcel.put(np.array([count], np.int32)),
            weights=parcel.put(addresses),
            begin=parcel.put(begin),
            pairs=parcel.put(pairs),
            capacity=count,
        )
        if not self._many:
            return _Launch(layout, groups, count)
        tile_tokens = tile_tokens_for(len(pairs), count)
        tiles = tile_groups(begin, tile_tokens)
        return _Launch(
            layout, groups, count, PrefillTiles(tiles=parcel.put(tiles), count=len(tiles), tokens=tile_tokens)
        )

    def _encode(self, normed: Tensor, kind: str) -> None:
        """Encode the layer's rows, unless they are encoded as `kind` already."""
        if kind == self._encoded_as:
            return
        assert self._room is not None
        self._encoded_as = kind
        rows = EncodedRows(
            kind=kind,
            rows=normed,
            num_tokens=len(normed),
            columns=self._shape.hidden,
            out=self._room.encoded,
        )
        self._native.encode(rows, self.device.stream())

    def _launch(self, part: _Launch, normed: Tensor) -> None:
        room, layout = self._room, part.layout
        assert room is not None
        stream, top_k = self.device.stream(), self._shape.top_k
        buffers = ExpertBuffers(
            encoded=room.encoded,
            intermediate=room.intermediate,
            outputs=room.outputs,
            gate_up=room.gate_up,
            adapted=room.adapted if self._is_adapted else None,
        )
        if part.tiles is not None:
            rows = PrefillRows(x=normed, num_tokens=len(normed), top_k=top_k)
            self._native.prefill_experts(layout, part.groups, buffers, part.tiles, rows, stream)
        else:
            self._encode(normed, layout.activations)
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
            return torch.empty(size, dtype=dtype, device=self.device.torch_device)

        tensor_cores = num_tokens > DECODE_TOKENS and any(self._tensor_cores)
        kinds = [layout for layouts in self._layouts for layout in layouts.kinds]
        # Per expert an address, a start and a tile; per pair a number (twice, once as int64), a place and a share of a
        # tile; per kind of expert the ends of arrays, in either part of a layer.
        most_kinds = max(len(layouts.kinds) for layouts in self._layouts)
        parcel_bytes = 20 * shape.num_experts + 14 * num_pairs + num_tokens + 768 + 256 * most_kinds
        return _Room(
            num_tokens=num_tokens,
            encoded=empty(max(layout.encoded_bytes(num_tokens) for layout in kinds), torch.uint8),
            intermediate=empty(max(layout.intermediate_bytes(num_pairs) for layout in kinds), torch.uint8),
            outputs=empty((num_pairs, shape.hidden), torch.float32),
            gate_up=empty(
                2 * num_pairs * max(shape.intermediate_sizes) if tensor_cores else 0, torch.float32
            ),
            adapted=empty((num_pairs if self._has_adapters else 0, 2, shape.intermediate), torch.float32),
            parcel=Parcel(self.device, parcel_bytes),
        )


def layers_on_tensor_cores(shape: MoeShape) -> list[bool]:
    """For each layer, whether steps of many tokens run on tensor cores."""
    whole = all(size % 16 == 0 for size in (shape.hidden, *shape.intermediate_sizes))
    return [
        whole and not any("f32" in formats for formats in distinct_formats(of_layer))
        for of_layer in shape.formats
    ]


class Parcel:
    """Small arrays packed into one buffer of mapped memory. A kernel copies it to the device: a copy would queue after
    uploads."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._native = device.native
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._host = device.staging_buffer((self._num_bytes,), torch.uint8)
        self._view = self._host.numpy()
        self._device = torch.empty(self._num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._used = 0

    def open(self) -> None:
        """Start a new parcel; the device has read the previous one."""
        self._used = 0

    def put(self, values: npt.NDArray[Any]) -> int:
        """Pack an array. Returns its address on the device."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        begin, end = self._used, self._used + raw.size
        if end > self._num_bytes:
            raise ValueError(f"{end} bytes were packed; there is room for {self._num_bytes}")
        self._view[begin:end] = raw
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._device.data_ptr() + begin

    def put_tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        """Pack an array that is not empty. Returns it as a tensor on the device, valid after `send`."""
        begin = self.put(values) - self._device.data_ptr()
        return self._device[begin : begin + values.nbytes].view(torch.int64)

    def send(self, stream: int) -> None:
        """Copy the packed arrays to the device; visible to work launched on `stream` afterwards."""
        self._native.read_host(self._host, self._device, self._used, stream)
