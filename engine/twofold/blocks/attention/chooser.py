"""Choose: parts of attention that choose positions one by one, such as learned indexers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from twofold.blocks import ops
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBatch, DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

SCORES_AT_ONCE: Final = 1 << 22
"""Scores of positions, by rows and positions, that a device sorts together for a prompt."""


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
    def flops_per_position(self) -> float:
        """Operations of one query and each position that it may choose."""
        return 0.0

    @property
    def device_elements_per_token(self) -> int:
        """Activation values per token that are alive at once on a device."""
        return 0

    @abstractmethod
    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser: ...

    @abstractmethod
    def device(self, weights: DeviceWeights) -> ChooserOnDevice: ...


def chosen_by_sequence(
    batch: DeviceBatch,
    kept: Tensor,
    lists: Callable[[slice, Tensor, Tensor], ChosenPositions],
    *,
    first: int = 0,
) -> ChosenPositions | None:
    """Lists of the rows of sequences from `first` on, before which each has one row; None: there are none. Reads
    lengths on the host.

    Args:
        kept: [pages, page_size, planes, elements], of which keys that are scored are made.
        lists: of some rows of a sequence, what is kept of it [length, planes * elements] and the rows' positions.
    """
    counts = (batch.query_lens or (1,) * len(batch.token_ids))[first:]
    lengths = (batch.host_seq_lens or batch.seq_lens.tolist())[first:] if counts else ()
    found, begin = None, first
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True), first):
        used = -(-length // kept.shape[1])
        keys = kept[batch.page_tables[s, :used].long()].flatten(0, 1)[:length].flatten(1)
        at_once = max(1, SCORES_AT_ONCE // max(1, length))
        for part in (
            slice(at, min(at + at_once, begin + count)) for at in range(begin, begin + count, at_once)
        ):
            own = batch.positions[part].clamp(max=length - 1)  # -1 of a row of padding
            found = lists(part, keys, own).after(found)
        begin += count
    return found
