"""How a device's kernels see a model's experts: layouts by layer, slots and stores, pairs sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from twofold._core.device import ExpertGroups, ExpertLayout
from twofold.api.errors import ConfigError
from twofold.experts.slot_plan import MoeShape

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class SlotSource(Protocol):
    """Where kernels find experts: those in slots, and those that they may read from the host. Addresses are the
    device's."""

    @property
    def slot_table(self) -> int:
        """Of the slot of every expert, i32 [layers][experts], -1: in none."""

    @property
    def slot_base(self) -> int: ...

    @property
    def slot_stride(self) -> int: ...

    @property
    def store_base(self) -> int:
        """Of the host's store; 0: nothing is read from there."""

    def split_table(self) -> Sequence[int]:
        """How many of so many misses beside so many hits are read from the host: [hits][misses], side top_k + 1."""

    def read_prices(self) -> Sequence[int]:
        """u32, what reading misses of several tokens is weighed by (kernels/cuda/read_choice.h); empty: none
        is read."""


class StoreLayout(Protocol):
    """Where a store keeps its experts, in bytes."""

    def offset(self, layer: int) -> int:
        """Of the layer's first expert from the store's begin."""

    def stride(self, layer: int) -> int:
        """From one expert of the layer to the next."""


class Grouping:
    """A layer's pairs by expert in the device's memory, as its kernels take them."""

    def __init__(self, capacity: int, num_pairs: int, device: torch.device) -> None:
        """Room for `capacity` experts and `num_pairs` pairs."""
        count = torch.zeros(1, dtype=torch.int32, device=device)
        weights = torch.zeros(capacity, dtype=torch.int64, device=device)
        begin = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
        pairs = torch.zeros(num_pairs, dtype=torch.int32, device=device)
        self._held = (count, weights, begin, pairs)
        self.groups = ExpertGroups(
            num_groups=count.data_ptr(), weights=weights.data_ptr(), begin=begin.data_ptr(),
            pairs=pairs.data_ptr(), capacity=capacity,
        )  # fmt: skip
        """What kernels are given; of use for as long as this object lives."""

    def fill(self, addresses: I64, begin: I32, pairs: I32) -> None:
        """The experts at `addresses` get the pairs as `by_expert` sorts them."""
        count = np.array([len(addresses)], np.int32)
        arrays: tuple[I32 | I64, ...] = (count, addresses, begin, pairs)
        for part, values in zip(self._held, arrays, strict=True):
            part[: len(values)].copy_(torch.from_numpy(values))


def by_expert(ids: I32) -> tuple[I32, I32, I32]:
    """(experts, begin, pairs) of a routing [tokens, top_k]: expert i gets pairs[begin[i] : begin[i + 1]]."""
    experts, counts = np.unique(ids, return_counts=True)
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return experts, begin, np.argsort(ids, axis=None, kind="stable").astype(np.int32)


def layouts_of(shape: MoeShape) -> list[ExpertLayout]:
    """Of each layer.

    Raises:
        ConfigError: the device has no kernels for a layer's formats.
    """
    return [_layout(formats, shape) for formats in shape.formats]


def _layout(formats: tuple[str, str, str], shape: MoeShape) -> ExpertLayout:
    gate, up, down = formats
    if gate != up:
        raise ConfigError(
            f"experts with gate in {gate} and up in {up} have no kernels on a device; gate and up of one format were "
            "expected. Use --accelerator none"
        )
    return ExpertLayout(gate, down, shape.hidden, shape.intermediate, shape.activation, shape.biases)
