"""Project: hidden states become queries, keys, values and gates in one product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.weights.tensor_spec import HasTensor, Role, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and their elements."""

    num: int
    num_kv: int
    dim: int
    value_dim: int
    """Elements of a value and of a head's output."""


@dataclass(frozen=True)
class Projections:
    """Kinds of projections of a grouped-query attention."""

    normed: bool = True
    """Whether the input is normed."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    gguf_pairs_neighbours: bool = False
    """Whether GGUF files order the rows of q and k for rotation of adjacent pairs."""
    keys_are_values: bool = False
    """Whether v is the output of k_proj before norm and rotation: there is no v_proj (Gemma 4)."""
    v_head_dim: int | None = None
    """Elements of a head of v; None: as many as of k (MiMo-V2)."""
    value_scale: float = 1.0
    """Factor of the values."""
    kv_layer: int | None = None
    """Earlier layer whose keys and values are read, with heads like this one's; None: its own (Gemma 4)."""

    @property
    def matrices(self) -> tuple[str, ...]:
        """Projections of queries, keys and values, in row order."""
        keys = () if self.kv_layer is not None else ("k",) if self.keys_are_values else ("k", "v")
        return ("q", *keys)

    def tensors(
        self, found: HasTensor, names: LayerNames, hidden: int, heads: Heads, q_rows: int
    ) -> dict[str, TensorSpec]:
        """Weights and biases; q_rows: rows of q_proj, with a gate that it holds."""
        sizes = {"q": q_rows, "k": heads.num_kv * heads.dim, "v": heads.num_kv * heads.value_dim}
        rows = {part: sizes[part] for part in self.matrices}
        ordered = {"q": heads.num, "k": heads.num_kv} if self.gguf_pairs_neighbours else {}

        def each(kind: str, *columns: int) -> Iterator[TensorSpec]:
            """Tensors of q, k and v; older GGUF files have them in one tensor."""
            role: Role = "matrix" if columns else "exact"
            hf, gguf, first = f"model.layers.{names.layer}.self_attn", f"blk.{names.layer}", 0
            for part, count in rows.items():
                name, shape = f"{hf}.{part}_proj.{kind}", (count, *columns)
                num_heads, stretch = ordered.get(part, 0), (first, sum(rows.values()))
                own = TensorSpec(name, shape, role, f"{gguf}.attn_{part}.{kind}", None, num_heads)
                joined = TensorSpec(name, shape, role, f"{gguf}.attn_qkv.{kind}", stretch, num_heads)
                yield joined if found(joined) and not found(own) else own
                first += count

        specs = {"norm": names.input_norm(hidden)} if self.normed else {}
        specs |= zip(rows, each("weight", hidden), strict=True)
        if self.bias:
            specs |= zip((f"{part}_bias" for part in rows), each("bias"), strict=True)
        return specs

    def cpu(self, heads: Heads) -> CpuPart:
        """Argument `heads` of a native block."""
        return {
            "num_heads": heads.num,
            "num_kv_heads": heads.num_kv,
            "head_dim": heads.dim,
            "value_dim": heads.value_dim,
            "keys_are_values": self.keys_are_values,
            "shares_kv": self.kv_layer is not None,
            "value_scale": self.value_scale,
        }

    def padded(self, qkv: Tensor, heads: Heads, full: int) -> Tensor:
        """qkv [T, …] with scaled values, and with heads of `full` elements."""
        import torch
        from torch.nn import functional

        q_and_k, values = torch.tensor_split(qkv, (qkv.shape[1] - heads.num_kv * heads.value_dim,), dim=1)
        values = (values * self.value_scale).reshape(len(qkv), heads.num_kv, heads.value_dim)
        keys = q_and_k.reshape(len(qkv), -1, heads.dim)
        parts = [functional.pad(part, (0, full - part.shape[2])).flatten(1) for part in (keys, values)]
        return torch.cat(parts, 1)
