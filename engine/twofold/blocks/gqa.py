"""Grouped-query attention over pages of keys and values, with its own norm.

Optional: biases, RMSNorm over each head of q and k before the rotation (Qwen3) or over all heads together (OLMoE), a
sliding window, sinks (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import F32, Block, BlockWeights, Cost, Pages
from twofold.weights.tensor_spec import Found, Role, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.device_step import (
        Allocate,
        DeviceBlock,
        DeviceState,
        DeviceStep,
        DeviceWeights,
        HeadShape,
        KvLayer,
    )


@dataclass(frozen=True)
class Gqa(Block):
    """Names follow Hugging Face where they are clear."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool = False
    """Of queries, keys and values."""
    o_bias: bool = False
    """Of the projection that writes to the residual stream."""
    qk_norm: bool = False
    flat_norms: bool = False
    """Whether the norms of q and k are of all heads together."""
    sliding_window: int | None = None
    sinks: bool = False
    """Whether each head has a logit that takes part in its softmax and has no value."""
    gguf_pairs_neighbours: bool = False
    """Whether GGUF files have the rows of q and k in the order in which rotation pairs neighbours."""

    @property
    def scale(self) -> float:
        """Of the products of queries and keys."""
        return float(self.head_dim**-0.5)

    def problems(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd, rotary embeddings need an even one"

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        hidden = self.hidden_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        heads = {"q": self.num_heads, "k": self.num_kv_heads} if self.gguf_pairs_neighbours else {}

        def projections(kind: str, *columns: int) -> Iterator[TensorSpec]:
            """Of q, k and v; older GGUF files have them in one tensor."""
            role: Role = "matrix" if columns else "exact"
            first = 0
            for part, count in rows.items():
                name, shape = f"{hf}.self_attn.{part}_proj.{kind}", (count, *columns)
                each = TensorSpec(name, shape, role, f"{gguf}.attn_{part}.{kind}", None, heads.get(part, 0))
                joined = TensorSpec(
                    name,
                    shape,
                    role,
                    f"{gguf}.attn_qkv.{kind}",
                    (first, q_rows + 2 * kv_rows),
                    each.gguf_heads,
                )
                yield joined if found(joined) and not found(each) else each
                first += count

        def vector(name: str, size: int, theirs: str) -> TensorSpec:
            return TensorSpec(f"{hf}.{name}", (size,), "exact", f"{gguf}.{theirs}")

        q, k, v = projections("weight", hidden)
        specs = {
            "norm": vector("input_layernorm.weight", hidden, "attn_norm.weight"),
            "q": q,
            "k": k,
            "v": v,
            "o": TensorSpec(
                f"{hf}.self_attn.o_proj.weight", (hidden, q_rows), "matrix", f"{gguf}.attn_output.weight"
            ),
        }
        if self.bias:
            specs |= zip(("q_bias", "k_bias", "v_bias"), projections("bias"), strict=True)
        if self.o_bias:
            specs["o_bias"] = vector("self_attn.o_proj.bias", hidden, "attn_output.bias")
        if self.sinks:
            name = f"{hf}.self_attn.sinks"
            specs["sinks"] = TensorSpec(name, (self.num_heads,), "exact", f"{gguf}.attn_sinks.weight")
        if self.qk_norm:
            sizes = (q_rows, kv_rows) if self.flat_norms else (self.head_dim, self.head_dim)
            specs |= {
                f"{part}_norm": vector(f"self_attn.{part}_norm.weight", size, f"attn_{part}_norm.weight")
                for part, size in zip("qk", sizes, strict=True)
            }
        return specs

    @property
    def state(self) -> tuple[Pages]:
        return (Pages(2 * self.num_kv_heads, self.head_dim),)

    @property
    def device_elements_per_token(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def device_bytes(self, weights: BlockWeights) -> int:
        """Biases are bf16 there."""
        biases = sum(spec.shape[0] for part, spec in weights.specs.items() if part.endswith("_bias"))
        return super().device_bytes(weights) - 2 * biases

    def cost(self, weights: BlockWeights, tokens: int = 1, behind: int = 0) -> Cost:
        base = super().cost(weights, tokens, behind)
        window = self.sliding_window or behind + tokens
        read = min(behind, window)
        pairs = sum(min(behind + token, window) for token in range(tokens))
        keys_and_values = 2 * self.state[0].elements_per_token  # bytes: a device keeps bf16
        return Cost(
            base.num_bytes + read * keys_and_values,
            base.flops + 4.0 * pairs * self.num_heads * self.head_dim,
        )

    @staticmethod
    def qkv_bias(weights: BlockWeights) -> F32 | None:
        """Of q, k and v one after the other."""
        if "q_bias" not in weights:
            return None
        return np.concatenate([weights.vector(f"{part}_bias") for part in "qkv"])

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, attention"
        return ops.Gqa(
            pool,
            weights.vector("norm"),
            weights.packed(pool, where, "q", "k", "v"),
            self.qkv_bias(weights),
            weights.optional_vector("q_norm"),
            weights.optional_vector("k_norm"),
            weights.packed(pool, where, "o"),
            weights.optional_vector("o_bias"),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.eps,
            self.scale,
            self.sliding_window,
            self.layer,
            self.flat_norms,
            weights.optional_vector("sinks"),
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        from twofold.blocks.device_step import HeadShape

        shape = HeadShape(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.sliding_window or 0, self.eps
        )
        return GqaOnDevice(
            shape,
            norm=weights.norm(),
            qkv=weights.matrix("q", "k", "v"),
            qkv_bias=weights.bias("q_bias", "k_bias", "v_bias"),
            norms=(weights.vector("q_norm"), weights.vector("k_norm")),
            flat_norms=self.flat_norms,
            o=weights.matrix("o"),
            o_bias=weights.bias("o_bias"),
            sinks=weights.vector("sinks"),
        )

    def device_state(self, num_pages: int, page_size: int, allocate: Allocate) -> DeviceState:
        shape = (num_pages, page_size, self.num_kv_heads, self.head_dim)
        return allocate(shape), allocate(shape)


@dataclass(frozen=True)
class GqaOnDevice:
    shape: HeadShape
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor | None, Tensor | None]
    """Of q and of k."""
    flat_norms: bool
    o: Tensor
    o_bias: Tensor | None
    sinks: Tensor | None
    """f32 [heads]."""

    def forward(self, hidden: Tensor, state: DeviceState, step: DeviceStep) -> None:
        from torch.nn import functional

        from twofold.blocks.device_step import KvLayer, normed

        qkv = functional.linear(normed(hidden, self.norm, self.shape.epsilon), self.qkv, self.qkv_bias)
        kv, norms = KvLayer(*state), self.norms
        if self.flat_norms:
            qkv, norms = self._normed(qkv), (None, None)
        q = step.kernels.rope_store(qkv, norms, step.angles, step.batch.slot_mapping, kv, self.shape)
        attended = self._attended(q, kv, step)
        hidden += functional.linear(attended.flatten(1), self.o, self.o_bias)

    def _normed(self, qkv: Tensor) -> Tensor:
        """With the norms of q and of k, each over all its heads."""
        import torch

        from twofold.blocks.device_step import normed

        sizes = [norm.numel() for norm in self.norms if norm is not None]
        *parts, v = torch.tensor_split(qkv, (sizes[0], sum(sizes)), dim=1)
        turned = [
            normed(part.float(), norm, self.shape.epsilon)
            for part, norm in zip(parts, self.norms, strict=True)
            if norm is not None
        ]
        return torch.cat([*turned, v], 1)

    def _attended(self, q: Tensor, kv: KvLayer, step: DeviceStep) -> Tensor:
        """Leading sequences of one token each share a launch."""
        import torch

        batch, kernels, shape = step.batch, step.kernels, self.shape
        num_decode, others = batch.sequences()
        parts = []
        if num_decode > 0:
            tables, lengths = batch.page_tables[:num_decode], batch.seq_lens[:num_decode]
            parts.append(kernels.decode_attention(q[:num_decode], tables, lengths, kv, shape, self.sinks))
        for s, rows in others:
            positions, seq_len = batch.positions[rows], batch.host_seq_lens[s]
            parts.append(
                kernels.prompt_attention(
                    q[rows], positions, batch.page_tables[s], seq_len, kv, shape, self.sinks
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
