"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed.

The cache holds one latent vector and one rotated key per token, from which all heads' keys and values would follow. A
head's query is projected into the latent space instead (with the keys' part of kv_b, W_UK), and its values are computed
from the weighted latents (with the values' part, W_UV).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from twofold._core.device import MlaDecode, MlaPages, MlaRows
from twofold.blocks import ops
from twofold.blocks.block import Block, Cost, Pages
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceStep, DeviceWeights, normed
from twofold.blocks.temperature import Temperature
from twofold.weights.tensor_spec import Found, Role, TensorSpec
from twofold.weights.weight_format import SCALE_GRID, WeightMatrix, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor


_PLAIN = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Mla(Block):
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
    scale: float
    """Scale of the attention scores."""
    bias: bool = False
    """Whether the projections from the hidden state and the output projection have biases; q_proj has none."""
    neighbours: bool = True
    """Whether the rotation pairs elements (2i, 2i + 1), as published; else (i, i + d/2)."""
    temperature: Temperature | None = None
    latent_eps: float = 1e-6
    """Epsilon of the norms of low-rank queries and latents; not in any configuration."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached(self) -> int:
        """Cached elements per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def problems(self) -> Iterator[str]:
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, rotary embeddings need an even one"

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        heads, latent, hidden = self.num_heads, self.kv_lora_rank, self.hidden_size

        def of(
            part: str, theirs: str, *shape: int, role: Role = "matrix", kind: str = "weight"
        ) -> TensorSpec:
            return TensorSpec(f"{hf}.{part}.{kind}", shape, role, f"{gguf}.{theirs}.{kind}")

        specs = {"norm": of("input_layernorm", "attn_norm", hidden, role="exact")}
        first, rows, theirs = "q_proj", heads * self.qk_head_dim, "attn_q"
        if self.q_lora_rank is not None:
            first, rows, theirs = "q_a_proj", self.q_lora_rank, "attn_q_a"
            specs |= {
                "q_norm": of("self_attn.q_a_layernorm", "attn_q_a_norm", rows, role="exact"),
                "q_b": of("self_attn.q_b_proj", "attn_q_b", heads * self.qk_head_dim, rows),
            }
        specs |= {
            "q": of(f"self_attn.{first}", theirs, rows, hidden),
            "kv": of("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", self.cached, hidden),
            "latent_norm": of("self_attn.kv_a_layernorm", "attn_kv_a_norm", latent, role="exact"),
            "o": of("self_attn.o_proj", "attn_output", hidden, heads * self.v_head_dim),
        }
        if self.bias:
            if self.q_lora_rank is not None:
                specs["q_bias"] = of(f"self_attn.{first}", theirs, rows, role="exact", kind="bias")
            specs |= {
                "kv_bias": of(
                    "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", self.cached, role="exact", kind="bias"
                ),
                "o_bias": of("self_attn.o_proj", "attn_output", hidden, role="exact", kind="bias"),
            }
        # As published; or by head, with the keys' part transposed, as in newer GGUF files. Quantising skips the tensor:
        # absorbed matrices are multiplied with its columns, not with its rows.
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        kv_b = of("self_attn.kv_b_proj", "attn_kv_b", heads * (nope + value), latent, role="exact")
        k_b = of("self_attn.k_b_proj", "attn_k_b", heads, latent, nope, role="exact")
        v_b = of("self_attn.v_b_proj", "attn_v_b", heads, value, latent, role="exact")
        return specs | ({"k_b": k_b, "v_b": v_b} if found(k_b) and not found(kv_b) else {"kv_b": kv_b})

    @property
    def state(self) -> tuple[Pages]:
        return (Pages(1, self.cached),)

    @property
    def device_elements_per_token(self) -> int:
        return self.num_heads * (self.qk_head_dim + 2 * self.cached)

    def host_bytes(self, weights: BlockWeights) -> int:
        if "kv_b" not in weights:
            return super().host_bytes(weights)
        keys, values = self._absorbed_formats(weights.format("kv_b"))
        absorbed = packed_bytes(keys, self.kv_lora_rank, self.qk_nope_head_dim)
        absorbed += packed_bytes(values, self.v_head_dim, self.kv_lora_rank)
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "kv_b")
        return others + self.num_heads * absorbed

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes, including the absorbed matrices in bf16."""
        absorbed = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        return super().device_bytes(weights) - 2 * absorbed

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        pairs = sum(context_len + token + 1 for token in range(tokens))
        return Cost(
            base.num_bytes + 2 * context_len * self.cached,  # a device keeps bf16
            base.flops + 2.0 * pairs * self.num_heads * (self.cached + self.kv_lora_rank),
        )

    def a_bias(self, weights: BlockWeights) -> F32 | None:
        """Concatenated biases of q and kv; q_proj has none."""
        if "kv_bias" not in weights:
            return None
        rows = weights.specs["q"].shape[0]
        of_q = weights.vector("q_bias") if "q_bias" in weights else np.zeros(rows, np.float32)
        return np.concatenate([of_q, weights.vector("kv_bias")])

    def absorbed(
        self, weights: BlockWeights, pool: ops.ThreadPool
    ) -> tuple[list[WeightMatrix], list[WeightMatrix]]:
        """Exact matrices per head: for its query [latent, nope], and for its weighted latents [value, latent].

        In the file's format if that can be transposed and split by head, else in float32.
        """
        if "kv_b" not in weights:
            return weights.stack("k_b"), weights.stack("v_b")
        whole = weights.matrix("kv_b")
        keys, values = self._absorbed_formats(whole.format)
        nope, stride = self.qk_nope_head_dim, self.qk_nope_head_dim + self.v_head_dim
        begins = range(0, whole.rows, stride)
        plain = whole
        # A row's own scales would be a column's after transposing.
        turns = keys == whole.format and (whole.scales is None or not whole.has_scales_by_row)
        if not turns or values != whole.format:
            plain = WeightMatrix(ops.dequantise(pool, whole), "f32", whole.columns)
        of_keys = whole if turns else plain
        of_values = whole if values == whole.format else plain
        return (
            [of_keys.row_range(begin, begin + nope).transposed() for begin in begins],
            [of_values.row_range(begin + nope, begin + stride) for begin in begins],
        )

    def _absorbed_formats(self, format: str) -> tuple[str, str]:
        """Formats of the keys' and the values' part of a kv_b in `format`."""
        if format in _PLAIN:
            return format, format
        if format == "fp8":  # each of its scales is of 128 x 128
            whole = all(size % SCALE_GRID == 0 for size in (self.qk_nope_head_dim, self.v_head_dim))
            return ("fp8", "fp8") if whole else ("f32", "f32")
        return "f32", format  # blocks of a row's columns

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where, temperature = f"layer {self.layer}, attention", self.temperature or Temperature()
        absorbed = functools.cache(lambda: self.absorbed(weights, pool))
        name = f"layer {self.layer}: {{}}, absorbed"
        keys = weights.pack(pool, where, name.format("keys"), lambda: absorbed()[0], by_head=True)
        values = weights.pack(pool, where, name.format("values"), lambda: absorbed()[1], by_head=True)
        return ops.Mla(
            pool,
            norm_weight=weights.vector("norm"),
            a_weight=weights.packed(pool, where, "q", "kv"),
            a_bias=self.a_bias(weights),
            q_norm=weights.optional_vector("q_norm"),
            q_b_weight=weights.packed(pool, where, "q_b") if "q_b" in weights else None,
            latent_norm=weights.vector("latent_norm"),
            k_b_weight=keys,
            v_b_weight=values,
            o_weight=weights.packed(pool, where, "o"),
            o_bias=weights.optional_vector("o_bias"),
            num_heads=self.num_heads,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            eps=self.eps,
            latent_eps=self.latent_eps,
            scale=self.scale,
            neighbours=self.neighbours,
            layer=self.layer,
            period=temperature.period,
            slope=temperature.slope,
            shift=temperature.shift,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        nope, value, latent = self.qk_nope_head_dim, self.v_head_dim, self.kv_lora_rank
        if "kv_b" in weights.source:
            by_head = weights.matrix("kv_b").view(self.num_heads, nope + value, latent)
            k_b, v_b = by_head[:, :nope].contiguous(), by_head[:, nope:].transpose(1, 2).contiguous()
        else:
            k_b, v_b = (weights.stack(part).transpose(1, 2).contiguous() for part in ("k_b", "v_b"))
        a_bias = self.a_bias(weights.source)
        a = weights.matrix("q", "kv")
        return MlaOnDevice(
            self,
            norm=weights.norm(),
            a=a,
            a_bias=None if a_bias is None else torch.from_numpy(a_bias).to(a.device, torch.bfloat16),
            q_norm=weights.vector("q_norm"),
            q_b=weights.matrix("q_b") if "q_b" in weights.source else None,
            latent_norm=weights.norm("latent_norm"),
            k_b=k_b,
            v_b=v_b,
            o=weights.matrix("o"),
            o_bias=weights.bias("o_bias"),
        )

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        return (allocate((num_pages, page_size, self.cached)),)


@dataclass(frozen=True)
class MlaOnDevice:
    """MLA device operator, absorbed for every row as on the CPU. Without native kernels, plain torch (the
    reference)."""

    shape: Mla
    norm: Tensor
    a: Tensor
    """Projections of q and kv."""
    a_bias: Tensor | None
    q_norm: Tensor | None
    q_b: Tensor | None
    latent_norm: Tensor
    k_b: Tensor
    """[heads, nope, latent]."""
    v_b: Tensor
    """[heads, latent, value]."""
    o: Tensor
    o_bias: Tensor | None

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch
        from torch.nn.functional import linear

        shape = self.shape
        a = linear(normed(hidden, self.norm, shape.eps), self.a, self.a_bias)
        q, compressed = a[:, : -shape.cached], a[:, -shape.cached :]
        if self.q_b is not None and self.q_norm is not None:
            q = linear(normed(q.float(), self.q_norm, shape.latent_eps), self.q_b)
        q = q.reshape(len(q), shape.num_heads, shape.qk_head_dim).contiguous()
        absorbed = q.new_empty((len(q), shape.num_heads, shape.cached))
        latents = torch.bmm(q[..., : shape.qk_nope_head_dim].transpose(0, 1), self.k_b)
        absorbed[..., : shape.kv_lora_rank] = latents.transpose(0, 1)
        self._store(compressed, q, absorbed, state[0], step)
        if shape.temperature is not None:
            absorbed *= shape.temperature.factors(step.batch.positions)[:, None, None].to(absorbed.dtype)
        values = torch.bmm(self._attended(absorbed, state[0], step).transpose(0, 1), self.v_b)
        total += linear(values.transpose(0, 1).flatten(1), self.o, self.o_bias)

    def _store(self, compressed: Tensor, q: Tensor, absorbed: Tensor, kept: Tensor, step: DeviceStep) -> None:
        """Write normalised latents and rotated keys to the cache, and rotated query parts after the absorbed
        queries."""
        import torch

        shape, native, (cos, sin) = self.shape, step.kernels.native, step.rotations[0]
        if native is not None:
            of_batch = MlaRows(
                compressed=compressed,
                stride=compressed.stride(0),
                queries=q,
                num_tokens=len(q),
                num_heads=shape.num_heads,
                nope=shape.qk_nope_head_dim,
                norm=self.latent_norm,
                epsilon=shape.latent_eps,
                cos=cos,
                sin=sin,
                neighbours=shape.neighbours,
                slot_mapping=step.batch.slot_mapping,
            )
            native.device.mla_store(of_batch, self._pages(kept), absorbed=absorbed, stream=native.stream())
            return
        latent, key = compressed[:, : shape.kv_lora_rank].float(), compressed[:, shape.kv_lora_rank :].float()
        latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], self.latent_norm, shape.latent_eps)
        rows = torch.cat([latent, self._rotated(key, cos, sin)], 1).to(kept.dtype)
        slots = step.batch.slot_mapping
        kept.view(-1, shape.cached)[slots[slots >= 0]] = rows[slots >= 0]
        turned = self._rotated(q[..., shape.qk_nope_head_dim :].float(), cos[:, None], sin[:, None])
        absorbed[..., shape.kv_lora_rank :] = turned.to(absorbed.dtype)

    def _attended(self, absorbed: Tensor, kept: Tensor, step: DeviceStep) -> Tensor:
        """Weighted latents [T, heads, latent]. Leading sequences of one token each share a launch."""
        import torch

        batch, native, shape = step.batch, step.kernels.native, self.shape
        num_decode, others = batch.sequences()
        out = absorbed.new_zeros((*absorbed.shape[:2], shape.kv_lora_rank))
        if native is not None and num_decode > 0:
            tables = batch.page_tables[:num_decode]
            max_length = min(native.max_length, tables.shape[1] * kept.shape[1])
            num_bytes = native.device.mla_workspace_bytes(
                num_sequences=num_decode,
                num_heads=shape.num_heads,
                latent=shape.kv_lora_rank,
                max_length=max_length,
            )
            decode = MlaDecode(
                absorbed=absorbed,
                page_tables=tables,
                seq_lens=batch.seq_lens,
                num_sequences=num_decode,
                num_heads=shape.num_heads,
                max_pages=tables.shape[1],
                max_length=max_length,
                scale=shape.scale,
            )
            workspace, pages = native.workspace(num_bytes, absorbed.device), self._pages(kept)
            native.device.mla_decode(decode, pages, workspace=workspace, out=out, stream=native.stream())
        elif num_decode > 0:
            lengths = batch.seq_lens[:num_decode].tolist()
            others = [*((s, slice(s, s + 1)) for s, length in enumerate(lengths) if length > 0), *others]
        for s, rows in others:
            length = int(batch.seq_lens[s]) if s < num_decode else batch.host_seq_lens[s]
            used = batch.page_tables[s, : -(-length // kept.shape[1])].long()
            latents = kept[used].flatten(0, 1)[:length].to(absorbed.dtype)[None, None]
            seen = torch.arange(length, device=kept.device)[None, :] <= batch.positions[rows][:, None]
            out[rows] = torch.nn.functional.scaled_dot_product_attention(
                absorbed[rows].transpose(0, 1)[None],
                latents,
                latents[..., : shape.kv_lora_rank],
                attn_mask=seen,
                scale=shape.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out

    def _pages(self, kept: Tensor) -> MlaPages:
        shape = self.shape
        return MlaPages(
            rows=kept, page_size=kept.shape[1], latent=shape.kv_lora_rank, rope=shape.qk_rope_head_dim
        )

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch

        first, second = (x[..., 0::2], x[..., 1::2]) if self.shape.neighbours else x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
