"""Adapters of a model on a device: puts each of an adapter's products into the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold import _core
from twofold.adapters.adapter import Adapter, LowRank
from twofold.adapters.base_shapes import PARTS, BaseShapes
from twofold.api.adapter_config import AdapterConfig
from twofold.api.errors import CapacityError, ModelLoadError
from twofold.blocks import ops
from twofold.device.adapters.factors import FactorBytes, FactorTable, moved
from twofold.device.adapters.matrices import DeviceMatrices, Layout, Part
from twofold.device.adapters.products import DenseTable, HomeRows, Products
from twofold.device.adapters.step import EMBEDDING, HEAD, HEAD_PRODUCT, TABLE, AdaptedStep
from twofold.device.device import Device
from twofold.models import ModelFiles
from twofold.models.sizing import gib
from twofold.step.adapter_rows import AdapterSteps
from twofold.step.adapters import EMBEDDING_NAME, HEAD_NAME, low_rank_like, refused, shapes_of

F32 = npt.NDArray[np.float32]
_NUM_ENDS: Final = 4
_MOST_PADDED: Final = 32
"""Rows of the largest step that is padded."""


@dataclass(frozen=True)
class DevicePrepared:
    """An adapter's products, with offsets in the place of addresses."""

    name: str
    data: FactorBytes
    dense: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    """Factors by the number of a dense tensor."""
    experts: npt.NDArray[Any] | None = None
    ends: npt.NDArray[Any] | None = None
    on_cpu: list[tuple[tuple[int, int, int], ops.LowRank]] = field(default_factory=list)
    """((layer, expert, matrix), product) for the experts that the CPU computes."""

    @property
    def num_bytes(self) -> int:
        """In the device's memory."""
        return self.data.num_bytes


@dataclass(frozen=True)
class _Place:
    """One of the devices."""

    device: Device
    products: Products
    experts: FactorTable
    memory: dict[int, Tensor] = field(default_factory=dict)
    """Factors by the adapter's number: the same on each device, as any may compute an expert."""


@dataclass(frozen=True)
class _Dense:
    """A dense tensor that adapters may change."""

    tensor: Tensor
    layout: Layout
    table: FactorTable


class DeviceAdapters:
    """What adapters of one model may change on a device, and what they do. Changes happen between two steps."""

    def __init__(
        self,
        files: ModelFiles,
        matrices: DeviceMatrices,
        store: _core.ExpertStore,
        *,
        devices: Sequence[Device],
        config: AdapterConfig,
        num_bytes: int,
    ) -> None:
        """Allocate the tables.

        Args:
            matrices: of the dense part on the devices; store: the experts in host memory.
            num_bytes: memory of each device that is reserved for adapters and these tables.
        """
        self.steps = AdapterSteps()
        """The adapters of the rows of experts that the CPU computes."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when captured steps no longer compute all that adapters change."""
        self._files, self._store, self._config = files, store, config
        number, rank = config.max_cpu_loras, config.max_lora_rank
        self._dense = [
            _Dense(
                tensor,
                layout,
                FactorTable(
                    (1, number, max(layout.num_heads, 1), len(layout.parts)),
                    rank,
                    devices[layout.home].torch_device,
                ),
            )
            for tensor, layout in matrices.items()
        ]
        shape = (store.num_layers, number, files.config.routed.num_experts, len(PARTS))
        self._devices = [
            _Place(device, Products(device), FactorTable(shape, rank, device.torch_device))
            for device in devices
        ]
        self._ends = FactorTable((1, number, 1, _NUM_ENDS), rank, devices[0].torch_device)
        tables = [self._devices[0].experts, self._ends, *(each.table for each in self._dense)]
        self._limit = num_bytes - sum(each.num_bytes for each in tables)
        self._changed: dict[int, DenseTable] = {}
        self._changes_experts = self._changes_ends = False

    @cached_property
    def shapes(self) -> BaseShapes:
        """The matrices of the model, for reading an adapter's files."""
        return shapes_of(self._files)

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters on each device."""
        return sum(map(len, self._devices[0].memory.values()))

    def step(self, adapters: Tensor) -> AdaptedStep:
        """A step whose rows use these adapters: int32 [T] on the first device, -1: none."""
        homes = [
            HomeRows(each.products, adapters.to(each.device.torch_device, non_blocking=True))
            for each in self._devices
        ]
        return AdaptedStep(
            homes,
            self._changed,
            [each.experts for each in self._devices] if self._changes_experts else [],
            self._ends if self._changes_ends else None,
        )

    def prepare(self, adapter: Adapter) -> DevicePrepared:
        """The adapter's products in host memory. Takes its time; on any thread.

        Raises ModelLoadError for a product of a matrix that takes none, and for a rank above --max-lora-rank.
        """
        if adapter.max_rank > self._config.max_lora_rank:
            raise ModelLoadError(
                f"adapter {adapter.name}: its rank {adapter.max_rank} is above --max-lora-rank "
                f"{self._config.max_lora_rank}, for which the device has room; raise it"
            )
        data, on_cpu, likes = FactorBytes(), [], dict[tuple[str, int], ops.LowRank]()
        experts, dense = self._devices[0].experts.empty(), dict[int, npt.NDArray[Any]]()
        for name, product in adapter.products.items():
            if name in (EMBEDDING_NAME, HEAD_NAME):
                continue
            module, _, part = name.rpartition(".")
            layer, _, expert = module.rpartition(".")
            if layer in self._layers:
                place = self._layers[layer], int(expert), PARTS.index(part)
                on_cpu.append((place, low_rank_like(likes, module, product)))
                first_row = product.b.shape[0] if part == PARTS[1] else 0  # gate's rows, then up's
                experts[place] = data.factors(product.a, np.ascontiguousarray(product.b.T), first_row)
                continue
            if not (places := self._places.get(name)):
                raise refused(adapter, name)
            for number, index in places:
                factors = dense.setdefault(number, self._dense[number].table.empty())
                _fill(factors[0], self._dense[number].layout, index, product, data)
        return DevicePrepared(
            adapter.name,
            data,
            dense,
            experts if on_cpu else None,
            _ends_of(adapter, data, self._ends),
            on_cpu,
        )

    def lacks_room(self, prepared: DevicePrepared) -> bool:
        """Whether other adapters must leave the device's memory first."""
        return self._limit >= prepared.num_bytes > self._limit - self.num_bytes

    def put(self, number: int, prepared: DevicePrepared) -> None:
        """Compute rows of the adapter `number` with these products, completely or not at all.

        Raises:
            CapacityError: the device's memory for adapters is too small.
            ModelLoadError: an expert's product does not fit.
        """
        if prepared.num_bytes > self._limit - self.num_bytes:
            raise self._no_room(prepared)
        try:
            self._put(number, prepared)
        except torch.OutOfMemoryError:
            self.drop(number)
            raise self._no_room(prepared) from None
        except ValueError as error:
            self.drop(number)
            raise ModelLoadError(f"the adapter does not fit the model: {error}") from None
        if self._grow(prepared):
            self.on_change()

    def drop(self, number: int) -> None:
        """Forget the adapter; no running request may use it. Safe for one that was never put."""
        self._store.drop_adapter(number)
        for home, place in enumerate(self._devices):
            with place.device.active():
                place.device.synchronise()
                for table in self._tables(home):
                    table.drop(number)
                place.memory.pop(number, None)
                place.device.synchronise()

    def _put(self, number: int, prepared: DevicePrepared) -> None:
        for expert, part in prepared.on_cpu:
            self._store.put_adapter(self.steps.native, number, expert, part)
        for home, place in enumerate(self._devices):
            with place.device.active():
                place.device.synchronise()  # copies are on another stream than steps
                memory = prepared.data.on(place.device.torch_device)
                base = memory.data_ptr()
                for at, factors in prepared.dense.items():
                    if self._dense[at].layout.home == home:
                        self._dense[at].table.put(number, moved(factors, base))
                if prepared.experts is not None:
                    place.experts.put(number, moved(prepared.experts, base))
                if prepared.ends is not None and home == 0:
                    self._ends.put(number, moved(prepared.ends, base))
                place.memory[number] = memory
                place.device.synchronise()

    def _tables(self, home: int) -> Iterator[FactorTable]:
        """All tables of a device."""
        yield self._devices[home].experts
        if home == 0:
            yield self._ends
        yield from (each.table for each in self._dense if each.layout.home == home)

    def _grow(self, prepared: DevicePrepared) -> bool:
        """Note what steps compute from now on; whether that is more than before."""
        before = len(self._changed), self._changes_experts, self._changes_ends
        for at in prepared.dense:
            dense = self._dense[at]
            room = dense.table.max_rank * len(dense.layout.parts)
            self._changed[id(dense.tensor)] = DenseTable(
                dense.table.native(), room, dense.layout.num_heads, dense.layout.home
            )
        self._changes_experts |= prepared.experts is not None
        self._changes_ends |= prepared.ends is not None
        return before != (len(self._changed), self._changes_experts, self._changes_ends)

    def _no_room(self, prepared: DevicePrepared) -> CapacityError:
        free = max(self._limit - self.num_bytes, 0)
        return CapacityError(
            f"adapter {prepared.name} takes {gib(prepared.num_bytes)} of GPU memory; {gib(free)} of the "
            f"{gib(self._limit)} reserved for adapters are free: raise --max-loras (now {self._config.max_loras})"
        )

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        """(dense tensor, its part) by the name of their matrix."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, dense in enumerate(self._dense):
            for index, part in enumerate(dense.layout.parts):
                found.setdefault(part.name, []).append((number, index))
        return found

    @cached_property
    def _layers(self) -> dict[str, int]:
        """MoE layers by the name of their experts."""
        return {name: layer for layer, name in enumerate(self.shapes.experts)}


def step_with(adapters: DeviceAdapters | None, rows: Tensor | None) -> AdaptedStep | None:
    """A step whose rows use these adapters; None: no row uses one."""
    if rows is None:
        return None
    assert adapters is not None, "a row uses an adapter of a model that has none"
    return adapters.step(rows)


@contextmanager
def rows_on_cpu(adapters: DeviceAdapters | None, numbers: Sequence[int]) -> Iterator[None]:
    """Context in which the CPU's experts use these adapters of the step's rows, -1: none. Rows of padding follow."""
    if adapters is None or not any(number >= 0 for number in numbers):
        yield
        return
    adapters.steps.native.set([*numbers, *[-1] * (_MOST_PADDED - len(numbers))])
    try:
        yield
    finally:
        adapters.steps.native.set([])


def _fill(factors: npt.NDArray[Any], layout: Layout, index: int, product: LowRank, data: FactorBytes) -> None:
    """Add a product to the factors [entries, parts] of a dense tensor."""
    part: Part = layout.parts[index]
    a = product.a if layout.columns is None else np.ascontiguousarray(product.a[:, layout.columns])
    if layout.num_heads == 0:
        factors[0, index] = data.factors(a, np.ascontiguousarray(product.b[part.rows].T), part.first_row)
        return
    for head, rows in enumerate(part.rows.reshape(layout.num_heads, -1)):
        own = np.ascontiguousarray(product.b[rows].T)
        factors[head, 0] = data.factors(a, own) if layout.is_transposed else data.factors(own, a)


def _ends_of(adapter: Adapter, data: FactorBytes, table: FactorTable) -> npt.NDArray[Any] | None:
    """An adapter's own ends of the model; None: it has none."""
    factors = table.empty()
    own, embedding = adapter.replaced.get(EMBEDDING_NAME), adapter.products.get(EMBEDDING_NAME)
    head, product = adapter.replaced.get(HEAD_NAME), adapter.products.get(HEAD_NAME)
    if own is not None:
        factors[0, 0, TABLE] = data.whole(own, own.shape[1])
    if embedding is not None:
        factors[0, 0, EMBEDDING] = data.factors(embedding.b, embedding.a)
    if head is not None:
        whole = head if product is None else head + product.b @ product.a
        factors[0, 0, HEAD] = data.whole(whole, len(whole))
    elif product is not None:
        factors[0, 0, HEAD_PRODUCT] = data.factors(product.a, np.ascontiguousarray(product.b.T))
    return factors if factors["rank"].any() else None
