"""Expert data as the device's kernels see it: layouts by layer, slots and stores, pairs sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from twofold._core.device import ExpertGroups, ExpertLayout
from twofold.api.errors import ConfigError
from twofold.experts.slot_plan import MoeShape
from twofold.weights.weight_format import ExpertFormats, formats_by_expert

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class SlotSource(Protocol):
    """Expert locations for kernels: slots, and experts readable from host memory. Addresses are device
    addresses."""

    @property
    def slot_table(self) -> int:
        """Address of the slot table, i32 [layers][experts]; -1: in no slot."""

    @property
    def slot_base(self) -> int: ...

    @property
    def slot_stride(self) -> int: ...

    @property
    def store_base(self) -> int:
        """Address of the host's store; 0: no expert is read from it."""

    def split_table(self) -> Sequence[int]:
        """Misses to read from the host, by [hits][misses], each side top_k + 1."""

    def read_prices(self) -> Sequence[int]:
        """Weights for reading misses of several tokens, u32 (kernels/device/read_choice.h); empty: no miss is read."""


class StoreLayout(Protocol):
    """Expert offsets in a store, in bytes."""

    def offsets(self, layer: int) -> I64:
        """Offset [experts] of each of a layer's experts from the start of the store."""


@dataclass(frozen=True)
class LayerLayouts:
    """Layouts of a layer's experts: one kind of expert for each distinct triple of formats and size."""

    kinds: tuple[ExpertLayout, ...]
    kind_of: npt.NDArray[np.uint8]
    """Index [experts] into `kinds` of each expert."""


class Grouping:
    """A layer's pairs sorted by expert, in device memory as kernels take them."""

    def __init__(self, capacity: int, num_pairs: int, device: torch.device, num_kinds: int = 1) -> None:
        """Allocate `capacity` experts of each kind and `num_pairs` pairs."""
        count = torch.zeros(num_kinds, dtype=torch.int32, device=device)
        weights = torch.zeros((num_kinds, capacity), dtype=torch.int64, device=device)
        begin = torch.zeros((num_kinds, capacity + 1), dtype=torch.int32, device=device)
        pairs = torch.zeros(num_pairs, dtype=torch.int32, device=device)
        self._held = (count, weights[0], begin[0], pairs)
        self.kinds = [
            ExpertGroups(
                num_groups=count[kind:],
                weights=weights[kind],
                begin=begin[kind],
                pairs=pairs,
                capacity=capacity,
            )
            for kind in range(num_kinds)
        ]
        """Kernel argument of each kind; valid for as long as this object lives."""

    @property
    def groups(self) -> ExpertGroups:
        """Kernel argument of the first kind, which `place` fills with those of all others."""
        return self.kinds[0]

    def fill(self, addresses: I64, begin: I32, pairs: I32) -> None:
        """Assign the pairs, sorted by `by_expert`, to the experts at `addresses`, all of the first kind."""
        count = np.array([len(addresses)], np.int32)
        arrays: tuple[I32 | I64, ...] = (count, addresses, begin, pairs)
        for part, values in zip(self._held, arrays, strict=True):
            part[: len(values)].copy_(torch.from_numpy(values))


def by_expert(ids: I32) -> tuple[I32, I32, I32]:
    """(experts, begin, pairs) of a routing [tokens, top_k]: expert i gets pairs[begin[i] : begin[i + 1]]."""
    experts, counts = np.unique(ids, return_counts=True)
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return experts, begin, np.argsort(ids, axis=None, kind="stable").astype(np.int32)


def layouts_of(shape: MoeShape) -> list[LayerLayouts]:
    """The layouts of each layer's experts.

    Raises:
        ConfigError: the device has no kernels for an expert's formats.
    """
    limits = shape.limits or (0.0,) * len(shape.formats)
    layouts = []
    sizes = np.repeat(shape.intermediate_sizes, shape.num_experts // len(shape.intermediate_sizes)).tolist()
    for formats, limit in zip(shape.formats, limits, strict=True):
        each = list(zip(formats_by_expert(formats, shape.num_experts), sizes, strict=True))
        distinct = list(dict.fromkeys(each))
        layouts.append(
            LayerLayouts(
                tuple(_layout(its, shape, limit, intermediate) for its, intermediate in distinct),
                np.fromiter(map(distinct.index, each), np.uint8, shape.num_experts),
            )
        )
    return layouts


def _layout(formats: ExpertFormats, shape: MoeShape, limit: float, intermediate: int) -> ExpertLayout:
    gate, up, down = formats
    if gate != up:
        raise ConfigError(
            f"experts with gate in {gate} and up in {up} have no kernels on a device; gate and up of one format were "
            "expected. Use --accelerator none"
        )
    sizes = shape.hidden, intermediate
    if len({ExpertLayout(each, each, *sizes).activations for each in (gate, down)}) > 1:
        raise ConfigError(
            f"experts with gate and up in {gate} and down in {down} have no kernels on a device, because they take "
            "activations of two kinds. Use --accelerator none"
        )
    return ExpertLayout(gate, down, *sizes, activation=shape.activation, biases=shape.biases, limit=limit)
