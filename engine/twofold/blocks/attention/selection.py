"""Select: which positions a query attends to: a stretch of them, or those that a `Chooser` chooses one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twofold._core import Stretch
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser, ChooserOnDevice
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block import Cost
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import Allocate, DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Selection(ABC):
    """Positions that a query attends to beside its own, all before it."""

    bidirectional: bool = False
    """Whether tokens of a picture attend to one another, so that some positions come after the query's."""

    @abstractmethod
    def num_before(self, position: int) -> int:
        """Number of earlier positions that the query at `position` attends to."""

    def scan(self, tokens: int, context_len: int) -> Cost:
        """Cost of choosing positions for `tokens` tokens after `context_len` earlier ones."""
        return Cost(0, 0)

    @abstractmethod
    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        """bool [Q, length]: which of a sequence's first `length` positions queries at `positions` [Q] attend to.

        ends: [Q] see `DeviceBatch.ends`.
        """

    @property
    @abstractmethod
    def native(self) -> Stretch:
        """The stretch of positions for native code, on the CPU and on a device."""

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        return {}

    @property
    def missing_in_device_kernels(self) -> str | None:
        """See `Block.missing_in_device_kernels`."""
        return None

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """State per token: (planes, elements of each), kept after the layer's keys and values."""
        return ()

    @property
    def device_elements_per_token(self) -> int:
        """Activation values per token that are alive at once on a device."""
        return 0

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> CpuPart:
        return {"stretch": self.native, "bidirectional": self.bidirectional}

    def device(self, weights: DeviceWeights) -> SelectionOnDevice:
        return SelectionOnDevice()

    def device_state(self, num_pages: int, page_size: int, allocate: Allocate) -> DeviceState:
        return tuple(allocate((num_pages, page_size, *plane)) for plane in self.planes)


@dataclass(frozen=True)
class AllPositions(Selection):
    """All earlier positions."""

    bidirectional: bool = field(default=False, kw_only=True)

    def num_before(self, position: int) -> int:
        return position

    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        import torch

        until = positions + 1 if ends is None or not self.bidirectional else ends
        return torch.arange(length, device=positions.device)[None, :] < until[:, None]

    @property
    def native(self) -> Stretch:
        return Stretch()


@dataclass(frozen=True)
class Window(AllPositions):
    """The last `size` positions, the query's own included."""

    size: int

    def num_before(self, position: int) -> int:
        return min(position, self.size)

    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        import torch

        places = torch.arange(length, device=positions.device)[None, :]
        return super().seen(positions, length, ends) & (places > positions[:, None] - self.size)

    @property
    def native(self) -> Stretch:
        return Stretch(window=self.size)


@dataclass(frozen=True)
class Chunk(AllPositions):
    """Positions of the query's own chunk of `size` consecutive ones (Llama 4)."""

    size: int

    def num_before(self, position: int) -> int:
        return position % self.size

    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        import torch

        begin = positions - positions % self.size
        places = torch.arange(length, device=positions.device)[None, :]
        return super().seen(positions, length, ends) & (places >= begin[:, None])

    @property
    def native(self) -> Stretch:
        return Stretch(chunk=self.size)


@dataclass(frozen=True)
class Chosen(Selection):
    """At most `most` positions, chosen for each query from all earlier ones and its own."""

    most: int
    chooser: Chooser | None = None
    """None: the layer attends to the positions that the last chooser of the step chose for an earlier layer."""
    within: Selection = field(default_factory=AllPositions)
    """Stretch that chosen positions have to be in."""

    def num_before(self, position: int) -> int:
        return min(self.within.num_before(position), self.most)

    def scan(self, tokens: int, context_len: int) -> Cost:
        scanned = [n for n in range(context_len + 1, context_len + tokens + 1) if n > self.most]
        if self.chooser is None or not scanned:
            return Cost(0, 0)
        num_bytes = sum(2 * planes * elements for planes, elements in self.planes)  # a device keeps bf16
        return Cost(context_len * num_bytes, sum(scanned) * self.chooser.flops_per_position)

    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        return self.within.seen(positions, length, ends)

    @property
    def native(self) -> Stretch:
        return self.within.native

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        return {} if self.chooser is None else self.chooser.tensors(found, names, hidden)

    @property
    def missing_in_device_kernels(self) -> str | None:
        return None if self.chooser is None else self.chooser.missing_in_device_kernels

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        return () if self.chooser is None else self.chooser.planes

    @property
    def device_elements_per_token(self) -> int:
        return 0 if self.chooser is None else self.chooser.device_elements_per_token

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> CpuPart:
        chooser = None if self.chooser is None else self.chooser.cpu(weights, pool)
        return super().cpu(weights, pool) | {"most": self.most, "chooser": chooser}

    def device(self, weights: DeviceWeights) -> SelectionOnDevice:
        return SelectionOnDevice(True, None if self.chooser is None else self.chooser.device(weights))


@dataclass(frozen=True)
class SelectionOnDevice:
    """Lists of chosen positions on a device, where a selection has them."""

    chooses: bool = False
    chooser: ChooserOnDevice | None = None

    def prepare(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions | None:
        """Lists of the step's rows; None: they attend to all of their stretch. See `ChooserOnDevice.choose`."""
        if not self.chooses:
            return None
        if self.chooser is not None:
            step.chosen_positions = self.chooser.choose(hidden, projected, state, step)
        if step.chosen_positions is None:
            raise KernelError(
                "Attention: a layer reads chosen positions; no earlier layer of this step has chosen any"
            )
        return step.chosen_positions
