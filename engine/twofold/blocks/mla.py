"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed.

The cache holds one latent vector and one rotated key per token, from which all heads' keys and values would follow. A
head's query is projected into the latent space instead (with the keys' part of kv_b, W_UK), and its values are computed
from the weighted latents (with the values' part, W_UV).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from twofold.blocks import ops
from twofold.blocks.attention.absorb import Absorbed
from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.query_scale import HeadScale, QueryScale
from twofold.blocks.attention.rotation import PAIRED, Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Selection
from twofold.blocks.block import BlockPart, ComposedBlock, Cost, Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceWeights
from twofold.blocks.mla_device import MlaOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec


@dataclass(frozen=True)
class Mla(ComposedBlock):
    """Multi-head latent attention; field names follow Hugging Face where they are clear."""

    kind: ClassVar[str] = "attention"
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Rank of the query projection; None: one matrix, no low rank."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    eps: float
    scores: Scores
    normed: bool = True
    """Whether the input is normed here."""
    bias: bool = False
    """Whether the projections from the hidden state and the output projection have biases; q_proj has none."""
    raw_queries: bool = False
    """Whether q_b_proj reads, after the normed low-rank queries, the same without the norm."""
    kv_layer: int | None = None
    """Earlier layer whose latents and shared keys are read; None: its own."""
    rotation: Rotation | None = PAIRED
    """As published; some checkpoints pair halves. None: the keys that heads share carry no positions."""
    scale: QueryScale | HeadScale | None = None
    select: Selection = field(default_factory=AllPositions)
    key_norm: bool = False
    """Whether the key that heads share has a norm before its rotation."""
    gate: Gate | None = None
    """Gate of the heads' values: from the block's input, or after each head's query; None: they have none."""
    latent_scale: float = 1.0
    """Factor of the normed latents."""
    latent_eps: float = 1e-6
    """Epsilon of the norms of low-rank queries and latents; not in any configuration."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def query_rows(self) -> int:
        """Rows of the last projection of queries for one head."""
        interleaved = self.gate is not None and not self.gate.module
        return self.qk_head_dim + (self.v_head_dim if interleaved else 0)

    @property
    def cached(self) -> int:
        """Elements per token that are cached, here or in the layer that they are read from."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorb(self) -> Absorbed:
        return Absorbed(self.num_heads, self.qk_nope_head_dim, self.v_head_dim, self.kv_lora_rank)

    def problems(self) -> Iterator[str]:
        if self.rotation is not None and self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, rotary embeddings need an even one"

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        names, heads, hidden = LayerNames(self.layer), self.num_heads, self.hidden_size
        out = {"o": names.matrix("o_proj", "attn_output", hidden, heads * self.v_head_dim)}
        if self.bias:
            out["o_bias"] = names.bias("o_proj", "attn_output", hidden)
        scale = {} if self.scale is None else self.scale.tensors(names, heads)
        return (
            BlockPart("project", _projections(self, names)),
            BlockPart("norm", _latent_norms(self, names)),
            BlockPart("expand", _expansion(self, names)),
            BlockPart("absorb", self.absorb.tensors(names, found)),
            BlockPart("rotate", settings=self.rotation),
            BlockPart("scale", scale, self.scale),
            BlockPart("select", self.select.tensors(found, names, hidden), self.select),
            BlockPart("attend", self.scores.tensors(names, heads), self.scores, self._per_position),
            BlockPart("gate", settings=self.gate),
            BlockPart("out", out),
        )

    @property
    def gate_rows(self) -> int:
        """Rows of the gate's projection, which are the last ones of `project`."""
        return 0 if self.gate is None else self.num_heads * self.gate.rows(self.v_head_dim)

    @property
    def _per_position(self) -> Cost:
        # A device keeps bf16.
        return Cost(2 * self.cached, 2.0 * self.num_heads * (self.cached + self.kv_lora_rank))

    @property
    def bidirectional_pictures(self) -> bool:
        return self.select.bidirectional

    @property
    def state(self) -> tuple[Pages, ...]:
        own = () if self.kv_layer is not None else (Pages(1, self.cached),)
        return *own, *(Pages(*plane) for plane in self.select.planes)

    @property
    def state_layer(self) -> int:
        return self.layer if self.kv_layer is None else self.kv_layer

    @property
    def device_elements_per_token(self) -> int:
        heads = self.num_heads * (self.query_rows + 2 * self.cached)
        return heads + self.select.device_elements_per_token

    def host_bytes(self, weights: BlockWeights) -> int:
        absorbed = ("kv_b", "k_b", "v_b")
        others = sum(weights.packed_bytes(part) for part in weights.specs if part not in absorbed)
        return others + self.absorb.host_bytes(weights)

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes, including the absorbed matrices in bf16."""
        return super().device_bytes(weights) - 2 * self.absorb.num_weights

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        seen = [self.select.num_before(context_len + token) for token in range(tokens)]
        read, pairs = min(context_len, seen[0] if seen else 0), sum(seen) + tokens
        each, scan = self._per_position, self.select.scan(tokens, context_len)
        return Cost(
            base.num_bytes + read * each.num_bytes + scan.num_bytes,
            base.flops + pairs * each.flops + scan.flops,
        )

    @property
    def project(self) -> Linear:
        """Projections of queries, or of their low-rank part, of latents and of the shared key, then of gates."""
        kv = () if self.kv_layer is not None else ("kv",)
        return Linear(("q", *kv, *(("gate",) if self.gate_rows else ())), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where, norm = f"layer {self.layer}, attention", weights.optional_vector("latent_norm")
        return ops.Mla(
            pool,
            layer=self.layer,
            kv_layer=self.kv_layer,
            num_heads=self.num_heads,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            project=self.project.cpu(weights, pool, where),
            q_b=_expand(self).cpu(weights, pool, where) if "q_b" in weights else None,
            latent_norm=norm_part(
                None if norm is None else norm * np.float32(self.latent_scale), self.latent_eps
            ),
            key_norm=norm_part(weights.optional_vector("key_norm"), self.latent_eps),
            **self.absorb.cpu(weights, pool, self.layer),
            rotation=None if self.rotation is None else self.rotation.cpu(),
            scale=None if self.scale is None else self.scale.cpu(weights),
            select=self.select.cpu(weights, pool),
            scores=self.scores.cpu(weights),
            gate=None if self.gate is None else self.gate.cpu(self.v_head_dim),
            out=Linear(("o",)).cpu(weights, pool, where),
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        latent_norm = weights.vector("latent_norm")
        return MlaOnDevice(
            self,
            project=self.project.device(weights),
            expand=_expand(self).device(weights) if "q_b" in weights.source else None,
            latent_norm=None if latent_norm is None else latent_norm * self.latent_scale,
            key_norm=weights.vector("key_norm"),
            **self.absorb.device(weights),
            scale=None if self.scale is None else self.scale.device(weights),
            select=self.select.device(weights),
            out=Linear(("o",)).device(weights),
            sinks=weights.vector("sinks"),
        )

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        own = self.select.device_state(num_pages, page_size, allocate)
        return own if self.kv_layer is not None else (allocate((num_pages, page_size, self.cached)), *own)


def _projections(block: Mla, names: LayerNames) -> dict[str, TensorSpec]:
    """Tensors of the projections of the hidden state."""
    hidden = block.hidden_size
    first, rows, theirs = "q_proj", block.num_heads * block.query_rows, "attn_q"
    if block.q_lora_rank is not None:
        first, rows, theirs = "q_a_proj", block.q_lora_rank, "attn_q_a"
    kv = "kv_a_proj_with_mqa", "attn_kv_a_mqa", block.cached
    found = {"norm": names.input_norm(hidden)} if block.normed else {}
    found["q"] = names.matrix(first, theirs, rows, hidden)
    if block.kv_layer is None:
        found["kv"] = names.matrix(*kv, hidden)
    if block.gate is not None:
        found |= block.gate.tensors(names, hidden, block.num_heads, block.v_head_dim)
    if block.bias and block.q_lora_rank is not None:
        found["q_bias"] = names.bias(first, theirs, rows)
    if block.bias and block.kv_layer is None:
        found["kv_bias"] = names.bias(*kv)
    return found


def _latent_norms(block: Mla, names: LayerNames) -> dict[str, TensorSpec]:
    if block.kv_layer is not None:
        return {}
    found = {"latent_norm": names.norm("kv_a_layernorm", "attn_kv_a_norm", block.kv_lora_rank)}
    if block.key_norm:
        found["key_norm"] = names.norm("k_rope_only_layernorm", "attn_k_norm", block.qk_rope_head_dim)
    return found


def _expansion(block: Mla, names: LayerNames) -> dict[str, TensorSpec]:
    """Tensors of the projection of low-rank queries."""
    if block.q_lora_rank is None:
        return {}
    columns = block.q_lora_rank * (1 + block.raw_queries)
    return {
        "q_norm": names.norm("q_a_layernorm", "attn_q_a_norm", block.q_lora_rank),
        "q_b": names.matrix("q_b_proj", "attn_q_b", block.num_heads * block.query_rows, columns),
    }


def _expand(block: Mla) -> Linear:
    """Queries from their low-rank part."""
    return Linear(("q_b",), "q_norm", block.latent_eps, block.raw_queries)
