"""The residual stream on a device: sums that blocks add to, and several streams of a hidden state each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep

if TYPE_CHECKING:
    from torch import Tensor


class ResidualOnDevice(ABC):
    """Follows the `over` blocks whose outputs it puts into the residual stream; those add to rows of zeros."""

    over: int
    reads: ClassVar[bool] = False
    """Whether its blocks read what `read` makes; else what blocks before them read."""

    def read(self, residual: Tensor, step: DeviceStep) -> Tensor:
        """Input f32 [T, hidden] of its blocks, if it makes any."""
        return residual

    @abstractmethod
    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Put `hidden`, the sum of the blocks' outputs, into `total`."""


class StreamsOnDevice(ResidualOnDevice):
    """The same with several streams: the residual is f32 [T, streams, hidden]."""

    reads: ClassVar[bool] = True

    @property
    @abstractmethod
    def num_streams(self) -> int: ...


class StreamBlockOnDevice(ABC):
    """Reads all streams and adds to each of them: `hidden` and `total` are f32 [T, streams, hidden]."""

    @property
    @abstractmethod
    def num_streams(self) -> int: ...

    @abstractmethod
    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None: ...


class StreamHeadOnDevice(ABC):
    """Ends a model of several streams."""

    @abstractmethod
    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Add a sum of the streams, f32 [T, streams, hidden], to `total`, f32 [T, hidden]."""


Begun = Sequence[ResidualOnDevice]


def begun_residuals(blocks: Sequence[DeviceBlock]) -> list[Begun]:
    """For each block, the residuals over blocks from it on: a sum beside the residual stream begins for each."""
    found: list[list[ResidualOnDevice]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        if isinstance(block, ResidualOnDevice):
            found[n - block.over].insert(0, block)
    return [tuple(each) for each in found]


def run_blocks(
    blocks: Iterable[tuple[DeviceBlock, Begun, DeviceState]], totals: list[Tensor], step: DeviceStep
) -> None:
    """Compute blocks in order.

    Args:
        blocks: each with the residuals that begin with it, and its state.
        totals: the residual stream, then sums that were begun beside it; in and out.
    """
    hidden = totals[0]
    for block, begun, state in blocks:
        if isinstance(block, StreamHeadOnDevice):
            streams, totals[0] = totals[0], totals[0].new_zeros(totals[0][:, 0].shape)
            block.forward(streams, totals[0], state, step)
            continue
        if isinstance(block, StreamBlockOnDevice):
            hidden = totals[0] = _in_streams(totals[0], block.num_streams)
        for residual in begun:
            if isinstance(residual, StreamsOnDevice):
                totals[0] = _in_streams(totals[0], residual.num_streams)
            if residual.reads:
                hidden = residual.read(totals[0], step)
            totals.append(hidden.new_zeros(hidden.shape))
        if isinstance(block, ResidualOnDevice):
            block.forward(totals.pop(), totals[-1], state, step)
            hidden = totals[0] if block.reads else hidden
        else:
            block.forward(hidden, totals[-1], state, step)


def joined(residual: Tensor) -> Tensor:
    """The mean of several streams where no `StreamHeadOnDevice` ended them."""
    return residual.mean(1) if residual.ndim == 3 else residual


def _in_streams(residual: Tensor, count: int) -> Tensor:
    """The streams; before the first block all are the embedding."""
    return residual if residual.ndim == 3 else residual[:, None].repeat(1, count, 1)
