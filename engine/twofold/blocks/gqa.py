"""Grouped-query attention with a paged KV cache, and its own norm.

Optional: biases; RMSNorm over each head of q and k before the rotation (Qwen3) or over all heads together (OLMoE);
sliding window; chunks; layers without rotation whose queries are scaled by position (Llama 4); an output gate
(Qwen3-Next); sinks (gpt-oss); normed values, or values from the keys' projection (Gemma 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import Block, Cost, Pages
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import (
    Allocate,
    DeviceBlock,
    DeviceState,
    DeviceStep,
    DeviceWeights,
    HeadShape,
    KvLayer,
    Norms,
    normed,
)
from twofold.weights.tensor_spec import Found, Role, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gqa(Block):
    """Grouped-query attention; field names follow Hugging Face where they are clear."""

    kind: ClassVar[str] = "attention"
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool = False
    """Whether queries, keys and values have biases."""
    o_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: bool = False
    flat_norms: bool = False
    """Whether the norms of q and k are over all heads together."""
    sliding_window: int | None = None
    sinks: bool = False
    """Whether each head has a logit that takes part in its softmax and has no value."""
    gguf_pairs_neighbours: bool = False
    """Whether GGUF files order the rows of q and k for rotation of adjacent pairs."""
    neighbours: bool = False
    """Whether the rotation, then of whole heads, pairs elements 2i and 2i + 1."""
    unit_norms: bool = False
    """Whether each head of q and k has a norm without weights; before or after the rotation, which preserves length."""
    v_norm: bool = False
    """Whether each head of v has a norm, without weights."""
    keys_are_values: bool = False
    """Whether v is the output of k_proj before norm and rotation: there is no v_proj."""
    rotated: bool = True
    rotation: int = 0
    """Index into `ModelConfig.rotations`."""
    attention_chunk: int | None = None
    """Attention chunk size, positions; None: no chunks."""
    temperature: tuple[float, float] | None = None
    """(period, slope): queries are multiplied by 1 + slope * log1p(floor((position + 1) / period))."""
    multiplier: float | None = None
    """Scale of the attention scores; None: 1 / sqrt(head_dim)."""
    gated: bool = False
    """Whether q_proj has, after each head's query, as many rows of a gate; its sigmoid multiplies the head's output."""
    zero_centred: bool = False
    """Whether checkpoints store the norms minus 1."""
    head_eps: float | None = None
    """Epsilon of the norms of q, k and v; None: `eps`."""

    @property
    def scale(self) -> float:
        """Scale of the attention scores."""
        return float(self.head_dim**-0.5) if self.multiplier is None else self.multiplier

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
        out_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_rows = (1 + self.gated) * out_rows
        rows = {part: q_rows if part == "q" else kv_rows for part in self.parts}
        heads = {"q": self.num_heads, "k": self.num_kv_heads} if self.gguf_pairs_neighbours else {}

        def projections(kind: str, *columns: int) -> Iterator[TensorSpec]:
            """Tensors of q, k and v; older GGUF files have them in one tensor."""
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
                    (first, sum(rows.values())),
                    each.gguf_heads,
                )
                yield joined if found(joined) and not found(each) else each
                first += count

        def vector(name: str, size: int, theirs: str) -> TensorSpec:
            centred = self.zero_centred and not name.endswith("bias")
            return TensorSpec(f"{hf}.{name}", (size,), "exact", f"{gguf}.{theirs}", zero_centred=centred)

        specs = {
            "norm": vector("input_layernorm.weight", hidden, "attn_norm.weight"),
            **dict(zip(rows, projections("weight", hidden), strict=True)),
            "o": TensorSpec(
                f"{hf}.self_attn.o_proj.weight", (hidden, out_rows), "matrix", f"{gguf}.attn_output.weight"
            ),
        }
        if self.bias:
            specs |= zip((f"{part}_bias" for part in rows), projections("bias"), strict=True)
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
        return ((1 + 2 * self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes; biases are bf16 there, and norms have weights."""
        biases = sum(spec.shape[0] for part, spec in weights.specs.items() if part.endswith("_bias"))
        unit = 4 * self.head_dim * (self.unit_norms or self.v_norm)
        return super().device_bytes(weights) - 2 * biases + unit

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        seen = [self._seen(context_len + token) for token in range(tokens)]
        read, pairs = min(context_len, seen[0] if seen else 0), sum(seen)
        keys_and_values = 2 * self.state[0].elements_per_token  # bytes: a device keeps bf16
        return Cost(
            base.num_bytes + read * keys_and_values,
            base.flops + 4.0 * pairs * self.num_heads * self.head_dim,
        )

    def _seen(self, position: int) -> int:
        """Number of earlier positions that a token attends to."""
        if self.attention_chunk:
            return position % self.attention_chunk
        return min(position, self.sliding_window or position)

    @staticmethod
    def qkv_bias(weights: BlockWeights) -> F32 | None:
        """Concatenated biases of q, k and v."""
        if "q_bias" not in weights:
            return None
        return np.concatenate([weights.vector(f"{part}_bias") for part in "qkv" if part in weights])

    @property
    def parts(self) -> tuple[str, ...]:
        """Projections, in row order."""
        return ("q", "k") if self.keys_are_values else ("q", "k", "v")

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, attention"
        ones = np.ones(self.head_dim, np.float32)
        unit = ones if self.unit_norms else None
        period, slope = self.temperature or (0.0, 0.0)
        return ops.Gqa(
            pool,
            norm_weight=weights.vector("norm"),
            qkv_weight=weights.packed(pool, where, *self.parts),
            qkv_bias=self.qkv_bias(weights),
            q_norm=weights.optional_vector("q_norm") if unit is None else unit,
            k_norm=weights.optional_vector("k_norm") if unit is None else unit,
            o_weight=weights.packed(pool, where, "o"),
            o_bias=weights.optional_vector("o_bias"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            scale=self.scale,
            sliding_window=self.sliding_window,
            layer=self.layer,
            flat_norms=self.flat_norms,
            chunk=self.attention_chunk,
            rotated=self.rotated,
            neighbours=self.neighbours,
            period=period,
            slope=slope,
            gated=self.gated,
            sinks=weights.optional_vector("sinks"),
            v_norm=ones if self.v_norm else None,
            keys_are_values=self.keys_are_values,
            rotation=self.rotation,
            head_eps=self.head_eps or self.eps,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        shape = HeadShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.sliding_window or 0,
            epsilon=self.head_eps or self.eps,
            chunk=self.attention_chunk or 0,
        )
        norm, bias = weights.norm(), weights.bias(*(f"{part}_bias" for part in self.parts))
        q_norm, k_norm = weights.vector("q_norm"), weights.vector("k_norm")
        ones = torch.ones(self.head_dim, device=norm.device)
        if self.unit_norms:
            q_norm = k_norm = ones
        return GqaOnDevice(
            self,
            shape,
            norm=norm,
            qkv=self._halves(weights.matrix(*self.parts)),
            qkv_bias=None if bias is None else self._halves(bias),
            norms=(q_norm, k_norm, ones if self.v_norm else None),
            o=weights.matrix("o"),
            o_bias=weights.bias("o_bias"),
            sinks=weights.vector("sinks"),
        )

    def _halves(self, rows: Tensor) -> Tensor:
        """Rows of q, k and v; if the rotation pairs adjacent elements, those of q and k are reordered to halves."""
        import torch

        if not self.neighbours:
            return rows
        of_values = 0 if self.keys_are_values else self.num_kv_heads * self.head_dim
        heads, v = torch.tensor_split(rows, (len(rows) - of_values,))
        pairs = heads.reshape(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return torch.cat([pairs.transpose(1, 2).reshape(heads.shape), v])

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        shape = (num_pages, page_size, self.num_kv_heads, self.head_dim)
        return allocate(shape), allocate(shape)


@dataclass(frozen=True)
class GqaOnDevice:
    attention: Gqa
    shape: HeadShape
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: Norms
    o: Tensor
    o_bias: Tensor | None
    sinks: Tensor | None
    """f32 [heads]."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch
        from torch.nn import functional

        qkv = functional.linear(normed(hidden, self.norm, self.attention.eps), self.qkv, self.qkv_bias)
        kv, norms = KvLayer(*state), self.norms
        gate = None
        if self.attention.gated:
            qkv, gate = self._ungated(qkv)
        if self.attention.flat_norms:
            qkv, norms = self._normed(qkv), (None, None, norms[2])
        if self.attention.keys_are_values:
            qkv = torch.cat([qkv, qkv[:, -self.shape.num_kv_heads * self.shape.head_dim :]], 1)
        cos, sin = step.rotations[self.attention.rotation]
        angles = (cos, sin) if self.attention.rotated else (cos[:, :0], sin[:, :0])
        q = step.kernels.rope_store(qkv, norms, angles, step.batch.slot_mapping, kv, self.shape)
        if self.attention.temperature is not None:
            period, slope = self.attention.temperature
            steps = ((step.batch.positions + 1) / period).floor()
            q = (q * (1.0 + slope * steps.log1p())[:, None, None]).to(q.dtype)
        attended = self._attended(q, kv, step)
        if gate is not None:
            attended = attended * gate.sigmoid()
        total += functional.linear(attended.flatten(1), self.o, self.o_bias)

    def _ungated(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """qkv without the gate rows, and the gates, [T, heads, head_dim]."""
        import torch

        shape = self.shape
        both = qkv[:, : 2 * shape.num_heads * shape.head_dim]
        q, gate = both.view(len(qkv), shape.num_heads, 2, shape.head_dim).unbind(2)
        return torch.cat([q.flatten(1), qkv[:, both.shape[1] :]], 1), gate

    def _normed(self, qkv: Tensor) -> Tensor:
        """qkv with the norms of q and k applied, each over all its heads."""
        import torch

        norms = self.norms[:2]
        sizes = [norm.numel() for norm in norms if norm is not None]
        *parts, v = torch.tensor_split(qkv, (sizes[0], sum(sizes)), dim=1)
        turned = [
            normed(part.float(), norm, self.shape.epsilon)
            for part, norm in zip(parts, norms, strict=True)
            if norm is not None
        ]
        return torch.cat([*turned, v], 1)

    def _attended(self, q: Tensor, kv: KvLayer, step: DeviceStep) -> Tensor:
        """Attention output; leading sequences of one token each share a launch."""
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
