"""Scale: a factor of queries that grows with the position (Llama 4, Mistral)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceWeights
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QueryScale:
    """Queries are multiplied by 1 + slope * log1p(floor((position + shift) / period)); period 0: not at all."""

    period: float = 0.0
    slope: float = 0.0
    shift: int = 1

    def tensors(self, names: LayerNames, num_heads: int) -> dict[str, TensorSpec]:
        return {}

    def cpu(self, weights: BlockWeights) -> CpuPart:
        return dict(vars(self))

    def device(self, weights: DeviceWeights) -> QueryScale:
        return self

    def factors(self, positions: Tensor) -> Tensor:
        """Factors f32 [T, 1] of the queries at `positions` [T]."""
        steps = ((positions + self.shift) / self.period).floor()
        return (1.0 + self.slope * steps.log1p())[:, None]


@dataclass(frozen=True)
class HeadScale:
    """Queries of a head are multiplied by slope * log(position + 1) + base, which are learned (Mistral Large 4)."""

    module: str = "softmax_scaling"
    role: str = "scale"
    """Begins the names of its parts in the block."""

    def tensors(self, names: LayerNames, num_heads: int) -> dict[str, TensorSpec]:
        """Files of GGUF have no names for these tensors."""
        parts = {"slopes": "scale", "bases": "bias"}
        return {
            f"{self.role}_{ours}": names.exact(f"{self.module}.{theirs}", "", num_heads)
            for ours, theirs in parts.items()
        }

    def cpu(self, weights: BlockWeights) -> CpuPart:
        return {part: weights.vector(f"{self.role}_{part}") for part in ("slopes", "bases")}

    def device(self, weights: DeviceWeights) -> HeadScaleOnDevice:
        return HeadScaleOnDevice(*(weights.norm(f"{self.role}_{part}") for part in ("slopes", "bases")))


@dataclass(frozen=True)
class HeadScaleOnDevice:
    """f32 [heads] each."""

    slopes: Tensor
    bases: Tensor

    def factors(self, positions: Tensor) -> Tensor:
        """Factors f32 [T, heads] of the queries at `positions` [T]."""
        return (positions + 1).float().log()[:, None] * self.slopes + self.bases
