"""Grouped-query attention with a paged KV cache, and its own norm.

Optional: biases; RMSNorm over each head of q and k before the rotation (Qwen3) or over all heads together (OLMoE);
sliding window; chunks; layers without rotation whose queries are scaled by position (Llama 4); an output gate
(Qwen3-Next) or gates of their own, one per head or per element (Laguna, AFMoE); sinks (gpt-oss); normed values, or
values from the keys' projection (Gemma 4); norms after the rotation (Hunyuan); values of another length (MiMo-V2);
keys and values of an earlier layer instead of its own (Gemma 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import Block, Cost, Pages
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import (
    Allocate,
    DeviceBlock,
    DeviceState,
    DeviceWeights,
    HeadShape,
)
from twofold.blocks.gqa_device import GqaOnDevice
from twofold.blocks.temperature import Temperature
from twofold.weights.tensor_spec import Found, Role, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_KERNEL_SIZES: Final = (64, 128, 256, 512)
"""Elements of a head for which there are device kernels (kernels/device/dense_layer.h)."""


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
    normed: bool = True
    """Whether the input is normed."""
    qk_norm: bool = False
    late_norms: bool = False
    """Whether the norms of q and k follow the rotation; it then has to preserve length."""
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
    temperature: Temperature | None = None
    multiplier: float | None = None
    """Scale of the attention scores; None: 1 / sqrt(head_dim)."""
    gated: bool = False
    """Whether q_proj has, after each head's query, as many rows of a gate; its sigmoid multiplies the head's output."""
    gate: str = ""
    """Module of the heads' gate if it is apart from q_proj."""
    gate_of: Literal["head", "element"] = "element"
    """What a row of `gate` multiplies: the whole output of a head, or one element of it."""
    softplus: bool = False
    """Whether the gate's softplus is taken instead of its sigmoid."""
    v_head_dim: int | None = None
    """Elements of a head of v; None: `head_dim`."""
    value_scale: float = 1.0
    """Factor of the values."""
    zero_centred: bool = False
    """Whether checkpoints store the norms minus 1."""
    head_eps: float | None = None
    """Epsilon of the norms of q, k and v; None: `eps`."""
    kv_layer: int | None = None
    """Earlier layer whose keys and values are read, with heads like this one's; None: its own."""

    @property
    def scale(self) -> float:
        """Scale of the attention scores."""
        return float(self.head_dim**-0.5) if self.multiplier is None else self.multiplier

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def device_head_dim(self) -> int:
        """Elements of a head on a device: a size that kernels have, where heads are padded because of their values."""
        fitting = (size for size in _KERNEL_SIZES if size >= self.head_dim)
        return self.head_dim if self.value_dim == self.head_dim else next(fitting, self.head_dim)

    @property
    def gate_rows(self) -> int:
        """Rows of `gate` for one head."""
        return 0 if not self.gate else 1 if self.gate_of == "head" else self.value_dim

    @property
    def all_gate_rows(self) -> int:
        return self.num_heads * self.gate_rows

    def problems(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd, rotary embeddings need an even one"
        if self.value_dim > self.head_dim:
            yield f"v_head_dim {self.value_dim} is more than head_dim {self.head_dim}"
        if self.value_dim != self.head_dim and (
            self.qk_norm or self.unit_norms or self.v_norm or self.neighbours
        ):
            yield f"v_head_dim {self.value_dim} differs from head_dim {self.head_dim} where heads have norms"

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        hidden = self.hidden_size
        out_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_rows = (1 + self.gated) * out_rows
        sizes = {"q": q_rows, "k": kv_rows, "v": self.num_kv_heads * self.value_dim}
        rows = {part: sizes[part] for part in self.parts if part in sizes}
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
                f"{hf}.self_attn.o_proj.weight",
                (hidden, self.num_heads * self.value_dim),
                "matrix",
                f"{gguf}.attn_output.weight",
            ),
        }
        if not self.normed:
            del specs["norm"]
        if self.gate:
            name, shape = f"{hf}.self_attn.{self.gate}.weight", (self.all_gate_rows, hidden)
            specs["gate"] = TensorSpec(name, shape, "matrix", f"{gguf}.attn_gate.weight")
        if self.bias:
            specs |= zip((f"{part}_bias" for part in rows), projections("bias"), strict=True)
        if self.o_bias:
            specs["o_bias"] = vector("self_attn.o_proj.bias", hidden, "attn_output.bias")
        if self.sinks:
            name = f"{hf}.self_attn.sinks"
            specs["sinks"] = TensorSpec(name, (self.num_heads,), "exact", f"{gguf}.attn_sinks.weight")
        if self.qk_norm:
            widths = (q_rows, kv_rows) if self.flat_norms else (self.head_dim, self.head_dim)
            specs |= {
                f"{part}_norm": vector(f"self_attn.{part}_norm.weight", size, f"attn_{part}_norm.weight")
                for part, size in zip("qk" if "k" in self.parts else "q", widths, strict=False)
            }
        return specs

    @property
    def state(self) -> tuple[Pages, ...]:
        if self.kv_layer is not None:
            return ()
        if self.value_dim == self.head_dim:
            return (Pages(2 * self.num_kv_heads, self.head_dim),)
        return Pages(self.num_kv_heads, self.head_dim), Pages(self.num_kv_heads, self.value_dim)

    @property
    def state_layer(self) -> int:
        return self.layer if self.kv_layer is None else self.kv_layer

    @property
    def device_page_elements(self) -> int:
        return 0 if self.kv_layer is not None else self._device_row_elements

    @property
    def _device_row_elements(self) -> int:
        """Elements of one token's keys and values on a device."""
        return 2 * self.num_kv_heads * self.device_head_dim

    @property
    def device_elements_per_token(self) -> int:
        gates = 2 * self.gated + 2 * bool(self.gate)
        return ((1 + gates) * self.num_heads + 2 * self.num_kv_heads) * self.device_head_dim

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes; biases are bf16 there, and norms have weights."""
        biases = sum(spec.shape[0] for part, spec in weights.specs.items() if part.endswith("_bias"))
        biases -= self.all_gate_rows * ("q_bias" in weights)  # zeros
        unit = 4 * self.head_dim * (self.unit_norms or self.v_norm)
        return super().device_bytes(weights) - 2 * biases + unit

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        seen = [self._seen(context_len + token) for token in range(tokens)]
        read, pairs = min(context_len, seen[0] if seen else 0), sum(seen)
        keys_and_values = 2 * self._device_row_elements  # bytes: a device keeps bf16
        return Cost(
            base.num_bytes + read * keys_and_values,
            base.flops + 2.0 * pairs * self.num_heads * (self.head_dim + self.value_dim),
        )

    def _seen(self, position: int) -> int:
        """Number of earlier positions that a token attends to."""
        if self.attention_chunk:
            return position % self.attention_chunk
        return min(position, self.sliding_window or position)

    def qkv_bias(self, weights: BlockWeights) -> F32 | None:
        """Concatenated biases of `parts`; a gate has none."""
        if "q_bias" not in weights:
            return None
        biases = [weights.vector(f"{part}_bias") for part in self.parts if part != "gate"]
        return np.concatenate([*biases, np.zeros(self.all_gate_rows, np.float32)])

    def q_scale(self, weights: BlockWeights) -> F32 | None:
        """Factors of a rotated query [head_dim] that the weights of late norms amount to: q . k has both."""
        if not self.late_norms:
            return None
        return np.asarray(weights.vector("q_norm") * weights.vector("k_norm"), np.float32)

    @property
    def parts(self) -> tuple[str, ...]:
        """Projections, in row order."""
        keys = () if self.kv_layer is not None else ("k",) if self.keys_are_values else ("k", "v")
        return ("q", *keys, *(("gate",) if self.gate else ()))

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, attention"
        ones = np.ones(self.head_dim, np.float32)
        unit = ones if self.unit_norms or self.late_norms else None
        temperature = self.temperature or Temperature()
        return ops.Gqa(
            pool,
            norm_weight=weights.optional_vector("norm"),
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
            layer=self.state_layer,
            shares_kv=self.kv_layer is not None,
            flat_norms=self.flat_norms,
            chunk=self.attention_chunk,
            rotated=self.rotated,
            neighbours=self.neighbours,
            period=temperature.period,
            slope=temperature.slope,
            shift=temperature.shift,
            gated=self.gated,
            gate_rows=self.gate_rows,
            softplus=self.softplus,
            value_dim=self.value_dim,
            value_scale=self.value_scale,
            q_scale=self.q_scale(weights),
            sinks=weights.optional_vector("sinks"),
            v_norm=ones[: self.value_dim] if self.v_norm else None,
            keys_are_values=self.keys_are_values,
            rotation=self.rotation,
            head_eps=self.head_eps or self.eps,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        shape = HeadShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.device_head_dim,
            scale=self.scale,
            window=self.sliding_window or 0,
            epsilon=self.head_eps or self.eps,
            chunk=self.attention_chunk or 0,
        )
        qkv, bias, q_scale = (
            weights.matrix(*self.parts),
            self.qkv_bias(weights.source),
            self.q_scale(weights.source),
        )
        q_norm, k_norm = weights.vector("q_norm"), weights.vector("k_norm")
        ones = torch.ones(self.head_dim, device=qkv.device)
        if self.unit_norms or self.late_norms:
            q_norm = k_norm = ones
        return GqaOnDevice(
            self,
            shape,
            norm=weights.vector("norm"),
            qkv=self._halves(qkv),
            qkv_bias=None
            if bias is None
            else self._halves(torch.from_numpy(bias).to(qkv.device, torch.bfloat16)),
            norms=(q_norm, k_norm, ones if self.v_norm else None),
            o=weights.matrix("o"),
            o_bias=weights.bias("o_bias"),
            sinks=weights.vector("sinks"),
            q_scale=None if q_scale is None else torch.from_numpy(q_scale).to(qkv.device),
        )

    def _halves(self, rows: Tensor) -> Tensor:
        """Rows of q, k and v; if the rotation pairs adjacent elements, those of q and k are reordered to halves."""
        import torch

        if not self.neighbours:
            return rows
        of_values = self.num_kv_heads * self.value_dim if "v" in self.parts else 0
        of_values += self.all_gate_rows
        heads, v = torch.tensor_split(rows, (len(rows) - of_values,))
        pairs = heads.reshape(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return torch.cat([pairs.transpose(1, 2).reshape(heads.shape), v])

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        if self.kv_layer is not None:
            return ()
        shape = (num_pages, page_size, self.num_kv_heads, self.device_head_dim)
        return allocate(shape), allocate(shape)
