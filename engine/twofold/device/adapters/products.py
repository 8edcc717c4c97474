"""The products of a step in which rows use adapters: dense ones, those of experts, and the ends of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twofold._core.device import AdaptedRows, LowRankInput, LowRankOutput, LowRankTable
from twofold.device.device import Device


@dataclass(frozen=True)
class Products:
    """Launches low-rank products on a device, on torch's current stream."""

    device: Device

    def add(self, table: LowRankTable, room: int, rows: AdaptedRows, x: Tensor, y: Tensor) -> None:
        """y[r] += B (A x[r]) for x [rows, columns] and y [rows, width], both contiguous.

        room: ranks that the table's parts take together.
        """
        t = self.ranks(len(x), room)
        self.down(table, rows, x, t)
        self.up(table, rows, t, y, adds=True)

    def down(self, table: LowRankTable, rows: AdaptedRows, x: Tensor, t: Tensor, divisor: int = 1) -> None:
        """t = A x of each row; row / divisor is its row of x [., columns]."""
        given = LowRankInput(
            x=x,
            is_f32=x.dtype == torch.float32,
            divisor=divisor,
            columns=x.shape[1],
            stride=x.stride(0),
        )
        self.device.native.low_rank_down(table, rows, given, t, self.device.stream())

    def up(self, table: LowRankTable, rows: AdaptedRows, t: Tensor, y: Tensor, *, adds: bool) -> None:
        """y += B t, or y = B t."""
        output = LowRankOutput(
            y=y, is_f32=y.dtype == torch.float32, adds=adds, width=y.shape[1], stride=y.stride(0)
        )
        self.device.native.low_rank_up(table, rows, t, output, self.device.stream())

    def gather(self, table: LowRankTable, rows: AdaptedRows, ids: Tensor, t: Tensor) -> None:
        """t = the rows `ids` [rows] of A."""
        self.device.native.low_rank_gather(table, rows, ids, t, self.device.stream())

    def ranks(self, num_rows: int, room: int) -> Tensor:
        """Room for `down`, f32 [rows, ranks]."""
        return torch.empty((num_rows, room), dtype=torch.float32, device=self.device.torch_device)


@dataclass(frozen=True)
class DenseTable:
    """A dense tensor's factors."""

    native: LowRankTable
    room: int
    """Ranks of its parts together."""
    num_heads: int
    """0: products are not by head."""
    home: int = 0
    """Number of the tensor's device."""


@dataclass(frozen=True)
class HomeRows:
    """A step's adapters on one device."""

    products: Products
    adapters: Tensor
    """int32 [T], -1: none."""


class AdaptedProducts(TorchFunctionMode):
    """Context in which products with a model's dense tensors add the adapters' parts of their rows.

    All blocks multiply by torch's `linear` and, head by head, `bmm`: the one place through which they pass. A graph
    that was captured inside has the launches and none of this.
    """

    def __init__(self, tables: Mapping[int, DenseTable], homes: Sequence[HomeRows]) -> None:
        """tables: of the tensors that adapters change, by id. homes: the step's rows on each device."""
        super().__init__()
        self._tables, self._homes = tables, homes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear or func is torch.bmm:
            table = self._tables.get(id(args[1]))
            if table is not None:
                return self._added(table, args[0], made)
        return made

    def _added(self, table: DenseTable, x: Tensor, made: Tensor) -> Tensor:
        home = self._homes[table.home]
        by_head, heads, num_tokens = table.num_heads > 0, max(table.num_heads, 1), len(home.adapters)
        if by_head:  # [heads, T, .] in, and out
            x, made = x.transpose(0, 1), made.transpose(0, 1)
        assert len(x) == num_tokens, f"{len(x)} rows of a product in a step of {num_tokens}"
        rows = AdaptedRows(adapters=home.adapters, num_tokens=num_tokens, per_token=heads)
        made = made.contiguous()
        x, y = x.reshape(num_tokens * heads, -1), made.view(num_tokens * heads, -1)
        home.products.add(table.native, table.room, rows, x.contiguous(), y)
        return made.transpose(0, 1) if by_head else made
