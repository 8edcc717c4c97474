"""Norm: RMSNorm of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import DeviceWeights, Norms
from twofold.weights.tensor_spec import TensorSpec


def norm_part(weight: F32 | None, eps: float) -> CpuPart | None:
    """A norm of a native block; None: no norm."""
    return None if weight is None else {"weight": weight, "eps": eps}


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries, keys and values."""

    qk: Literal["head", "flat", "unit", "late"] | None = "head"
    """Norms of q and k. head: over each head, before the rotation (Qwen3). flat: over all heads together (OLMoE).
    unit: over each head, without weights, before or after the rotation, which preserves length (Llama 4). late: over
    each head, after the rotation, which then has to preserve length (Hunyuan). None: none."""
    v: bool = False
    """Whether each head of v has a norm, without weights (Gemma 4)."""
    eps: float | None = None
    """Epsilon; None: that of the layer's norm."""

    @property
    def weighted(self) -> bool:
        """Whether norms of q and k have weights in a checkpoint."""
        return self.qk in ("head", "flat", "late")

    def tensors(self, names: LayerNames, widths: dict[str, int]) -> dict[str, TensorSpec]:
        """Weights of the norms; `widths`: elements of what each norm is over, by projection."""
        if not self.weighted:
            return {}
        return {
            f"{part}_norm": names.norm(f"{part}_norm", f"attn_{part}_norm", size)
            for part, size in widths.items()
        }

    def query_factors(self, weights: BlockWeights) -> F32 | None:
        """Factors of a rotated query [head_dim] that the weights of late norms amount to: q . k has both."""
        if self.qk != "late":
            return None
        return np.asarray(weights.vector("q_norm") * weights.vector("k_norm"), np.float32)

    def cpu(
        self, weights: BlockWeights, head_dim: int, value_dim: int, eps: float
    ) -> tuple[CpuPart | None, CpuPart | None, CpuPart | None]:
        """Norms of q, k and v for a native block."""
        eps = self.eps or eps
        ones = np.ones(head_dim, np.float32)
        unit = self.qk in ("unit", "late")
        q, k = (ones if unit else weights.optional_vector(f"{part}_norm") for part in "qk")
        v = ones[:value_dim] if self.v else None
        return norm_part(q, eps), norm_part(k, eps), norm_part(v, eps)

    def device(self, weights: DeviceWeights, head_dim: int) -> Norms:
        """f32 weights of the norms of q, k and v."""
        import torch

        q, k = weights.vector("q_norm"), weights.vector("k_norm")
        if self.qk not in ("unit", "late") and not self.v:
            return q, k, None
        ones = torch.ones(head_dim, device=weights.matrix("o").device)
        if self.qk in ("unit", "late"):
            q = k = ones
        return q, k, ones if self.v else None


NO_NORMS: Final = HeadNorms(None)
