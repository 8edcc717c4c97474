"""Gate: multiplies a head's output by an activation of its gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """A gate of the heads' outputs."""

    module: str = ""
    """Module of the gate's projection; empty: q_proj has the gate of a head after its query (Qwen3-Next)."""
    of: Literal["head", "element"] = "element"
    """Operand of a row of the gate: the whole output of a head, or one element of it."""
    activation: Literal["sigmoid", "softplus", "silu"] = "sigmoid"

    def rows(self, value_dim: int) -> int:
        """Rows of the gate's own projection for one head; 0 if q_proj has them."""
        return 0 if not self.module else 1 if self.of == "head" else value_dim

    def tensors(
        self, names: LayerNames, hidden: int, num_heads: int, value_dim: int
    ) -> dict[str, TensorSpec]:
        if not self.module:
            return {}
        rows = num_heads * self.rows(value_dim)
        return {"gate": names.matrix(self.module, "attn_gate", rows, hidden)}

    def cpu(self, value_dim: int) -> CpuPart:
        rows = self.rows(value_dim)
        return {"activation": self.activation, "interleaved": not self.module, "rows": rows}

    def apply(self, outputs: Tensor, gate: Tensor) -> Tensor:
        """outputs [T, heads, elements] times the activation of `gate` [T, heads, elements or 1]."""
        from torch.nn import functional

        if self.activation == "softplus":
            return outputs * functional.softplus(gate)
        return outputs * (functional.silu(gate) if self.activation == "silu" else gate.sigmoid())


SILU_OF_Z: Final = Gate("z", activation="silu")
"""A gated delta net's gate."""
