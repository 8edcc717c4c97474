"""Factors of adapters in a device's memory, and the tables through which kernels find them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold._core.device import LowRankTable, factors_bytes

F32 = npt.NDArray[np.float32]
FACTORS: Final = np.dtype(
    [("a", "u8"), ("b", "u8"), ("first_row", "i4"), ("rows", "i4"), ("rank", "i4"), ("is_f32", "i4")]
)
"""One entry of a table (kernels/device/low_rank_layer.h)."""
assert FACTORS.itemsize == factors_bytes()
_ALIGNMENT: Final = 16


class FactorTable:
    """Factors [groups, adapters, entries, parts] of products of one shape: of a matrix, or of the experts of layers."""

    def __init__(self, shape: tuple[int, int, int, int], max_rank: int, device: torch.device) -> None:
        """Allocate a table without factors. max_rank: of each part."""
        self.shape, self.max_rank = shape, max_rank
        self._memory = torch.zeros((*shape, FACTORS.itemsize), dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def native(
        self, group: int = 0, *, first: int = 0, count: int | None = None, max_rank: int | None = None
    ) -> LowRankTable:
        """Kernel argument for parts [first, first + count) of each entry of a group; valid while this object lives."""
        _, _, entries, parts = self.shape
        return LowRankTable(
            factors=self._memory[group],
            num_entries=entries,
            stride=parts,
            first=first,
            count=parts - first if count is None else count,
            max_rank=self.max_rank if max_rank is None else max_rank,
        )

    def empty(self) -> npt.NDArray[Any]:
        """Factors [groups, entries, parts] of an adapter that changes nothing."""
        groups, _, entries, parts = self.shape
        return np.zeros((groups, entries, parts), FACTORS)

    def put(self, number: int, factors: npt.NDArray[Any]) -> None:
        """Copy an adapter's factors to the device."""
        values = np.ascontiguousarray(factors).view(np.uint8).reshape(*factors.shape, FACTORS.itemsize)
        self._memory[:, number].copy_(torch.from_numpy(values))

    def drop(self, number: int) -> None:
        self._memory[:, number].zero_()


@dataclass
class FactorBytes:
    """An adapter's arrays on their way to one range of device memory."""

    num_bytes: int = 0
    _parts: list[tuple[int, Tensor]] = field(default_factory=list)
    _known: dict[tuple[int, ...], tuple[int, bool, F32]] = field(default_factory=dict)

    def add(self, values: F32) -> tuple[int, bool]:
        """(offset, whether it is float32) of an array, which is kept in bfloat16 where that is exact. The same memory
        lies there once."""
        key = values.ctypes.data, *values.shape, *values.strides
        if (known := self._known.get(key)) is not None:
            return known[:2]
        contiguous = np.ascontiguousarray(values, np.float32)
        is_f32 = bool((contiguous.view(np.uint32) & 0xFFFF).any())
        kept = torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
        kept = kept if is_f32 else kept.bfloat16()
        offset = self.num_bytes
        self._parts.append((offset, kept.view(-1).view(torch.uint8)))
        self.num_bytes += -(-kept.numel() * kept.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._known[key] = offset, is_f32, values  # held, so that no other array gets its address
        return offset, is_f32

    def factors(self, a: F32, b: F32, first_row: int = 0) -> tuple[int, int, int, int, int, int]:
        """One entry of a table, with offsets for addresses. a: [rank, columns]; b: [rank, rows], transposed."""
        at_a, a_is_f32 = self.add(a)
        at_b, b_is_f32 = self.add(b)
        return at_a, at_b, first_row, b.shape[1], len(b), a_is_f32 + 2 * b_is_f32

    def whole(self, values: F32, rank: int) -> tuple[int, int, int, int, int, int]:
        """One entry of a table for a whole matrix in the place of the model's."""
        at, is_f32 = self.add(values)
        return at, 0, 0, 0, rank, int(is_f32)

    def on(self, device: torch.device) -> Tensor:
        """All arrays in new memory of the device. torch.OutOfMemoryError: there is no room."""
        memory = torch.empty(max(self.num_bytes, _ALIGNMENT), dtype=torch.uint8, device=device)
        host = torch.empty(memory.shape, dtype=torch.uint8)
        for offset, part in self._parts:
            host[offset : offset + len(part)] = part
        memory.copy_(host)
        return memory


def moved(factors: npt.NDArray[Any], base: int) -> npt.NDArray[Any]:
    """Factors with addresses from `base` on in place of offsets."""
    at = factors.copy()
    for name in ("a", "b"):
        at[name] += np.where(at["rank"] > 0, np.uint64(base), np.uint64(0))
    return at
