"""Inputs of layers from rows of tables: they depend on token ids alone, so a step reads them before its first layer.

The tables stay in their files, which may be larger than the memory. `ops.RowTable` caches rows in use, up to a bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.weights.read_ahead import ReadAhead
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.device_step import DeviceWeights

I64 = npt.NDArray[np.int64]

CACHE_BYTES: Final = 256 * 1024 * 1024
"""Most bytes of a model's cached rows."""


class InputsOnDevice(Protocol):
    """Computes the inputs on a device."""

    @property
    def inputs(self) -> TableInputs: ...

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """f32 [T, width] of f32 [T, hidden], the scaled embeddings."""


class HostInputs(ABC):
    """Computes the inputs on the CPU."""

    def __init__(self, tables: Sequence[ops.RowTable]) -> None:
        self.tables = tuple(tables)
        self._read_ahead = ReadAhead()

    @abstractmethod
    def rows(self, ids: I64) -> list[I64]:
        """Rows [T, rows of a token] of each table, for `ids` as `forward` takes them."""

    @abstractmethod
    def forward(self, ids: I64, hidden: F32 | None, out: F32) -> None:
        """Inputs [T, width] of tokens whose scaled embeddings are `hidden`; `ids` [T, num_ids] as `TableInputs` says.

        hidden: None only where the inputs depend on token ids alone.

        Raises KernelError for a row with a NaN or an infinity.
        """

    def read_ahead(self, ids: I64) -> None:
        """Start reading rows of tokens that a later step computes, on a thread of their own."""

        def read() -> None:
            for table, rows in zip(self.tables, self.rows(ids), strict=True):
                table.read_ahead(rows)

        self._read_ahead.call(read)


@dataclass(frozen=True)
class TableInputs(ABC):
    """Inputs of layers from tables, as a family describes them; a part of the model's embedding."""

    cache_bytes: int = field(default=CACHE_BYTES, kw_only=True)
    """Most bytes of cached rows, of all tables together."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements of all layers' inputs."""

    @property
    def num_ids(self) -> int:
        """Token ids that a token's inputs depend on: its own, then those before it; -1 before the sequence's begin."""
        return 1

    @property
    def media_token(self) -> int | None:
        """The token whose inputs a picture's rows have; None: those of the prompt's tokens in its place."""
        return None

    @property
    def on_host(self) -> bool:
        """Whether devices do not hold the tables: the host computes the inputs, from token ids alone."""
        return False

    def problems(self, vocab_size: int) -> Iterator[str]:
        """Invalid sizes, described in config.json's terms."""
        return iter(())

    @abstractmethod
    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]: ...

    def check(self, weights: BlockWeights) -> None:
        """Raises ModelLoadError for tensors of another model; reads no rows."""
        return

    def table_parts(self, weights: BlockWeights) -> tuple[tuple[str, ...], ...]:
        """Roles in `tensors` of the parts of each table, in order of their rows."""
        return (("layer_table",),)

    def table_bytes(self, weights: BlockWeights) -> int:
        """Bytes of the tables in the files."""
        parts = chain.from_iterable(self.table_parts(weights))
        return sum(weights.source.entry(weights.specs[part].name).num_bytes for part in parts)

    def missing_bytes(self, weights: BlockWeights) -> int:
        """Bytes in bf16 of the tables that a device does not hold."""
        parts = chain.from_iterable(self.table_parts(weights)) if self.on_host else ()
        return sum(2 * math.prod(weights.specs[part].shape) for part in parts)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes: cached rows, and what else is packed."""
        tables = set(chain.from_iterable(self.table_parts(weights)))
        others = self.tensors(lambda spec: spec.name in weights.source).keys() - tables
        cached = min(self.cache_bytes, self.table_bytes(weights))
        return cached + sum(map(weights.packed_bytes, others))

    def row_tables(self, weights: BlockWeights, pool: ops.ThreadPool) -> list[ops.RowTable]:
        """The tables, each with its share of the cache."""
        tables = self.table_parts(weights)
        return [
            ops.RowTable(pool, list(map(weights.as_stored, parts)), self.cache_bytes // len(tables))
            for parts in tables
        ]

    @abstractmethod
    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> HostInputs:
        """Pack the matrices; the tables' rows stay in the files. Raises ModelLoadError."""

    def device(self, weights: DeviceWeights) -> InputsOnDevice | None:
        """Copy the weights to the device, unless the host computes the inputs. Needs torch."""
        return None
