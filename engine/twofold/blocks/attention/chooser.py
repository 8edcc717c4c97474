"""Choose: parts of attention that choose positions one by one, such as learned indexers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from twofold.blocks import ops
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class ChooserOnDevice(Protocol):
    """Device operator of a `Chooser`."""

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        """Lists of a batch's rows, whose keys are stored by then.

        Args:
            hidden: f32 [T, hidden], the block's input.
            projected: bf16 [T, width], the block's first product of it; latent attention's low-rank queries come first,
                without their norm.
            state: the chooser's own planes, [pages, page_size, planes, elements] each.
        """


class Chooser(ABC):
    """Chooses positions for the queries of a layer from its input: a part with tensors and state of its own."""

    def tensors(self, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        return {}

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """State per token: (planes, elements of each), kept after the layer's keys and values."""
        return ()

    @abstractmethod
    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser: ...

    @abstractmethod
    def device(self, weights: DeviceWeights) -> ChooserOnDevice: ...
