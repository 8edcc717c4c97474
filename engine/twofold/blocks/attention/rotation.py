"""Rotate: rotary embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotation of pairs of a head's elements by angles that grow with the position."""

    index: int = 0
    """Index into `ModelConfig.rotations`."""
    neighbours: bool = False
    """Whether elements 2i and 2i + 1 are a pair; else i and i + half of the rotated ones."""

    def cpu(self) -> CpuPart:
        return dict(vars(self))

    def angles(self, step: DeviceStep) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the batch's positions, f32 [T, rotated pairs] each."""
        return step.rotations[self.index]

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., 2 * pairs], rotated, with pairs as halves."""
        import torch

        first, second = (x[..., 0::2], x[..., 1::2]) if self.neighbours else x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def rotated_end(self, x: Tensor, cos: Tensor, sin: Tensor, *, last: bool = False) -> Tensor:
        """x [..., at least 2 * pairs], of which the first elements are rotated, or the last ones."""
        import torch

        size = 2 * cos.shape[-1]
        if last:
            begin = x.shape[-1] - size
            return torch.cat([x[..., :begin], self.rotated(x[..., begin:], cos, sin)], -1)
        return torch.cat([self.rotated(x[..., :size], cos, sin), x[..., size:]], -1)


PAIRED: Final = Rotation(neighbours=True)


def unrotated(step: DeviceStep) -> tuple[Tensor, Tensor]:
    """Angles of heads that carry no positions."""
    cos, sin = step.rotations[0]
    return cos[:, :0], sin[:, :0]
