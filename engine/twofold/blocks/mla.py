"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed.

The cache holds one latent vector and one rotated key per token, from which all heads' keys and values would follow. A
head's query is projected into the latent space instead (with the keys' part of kv_b, W_UK), and its values are computed
from the weighted latents (with the values' part, W_UV).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from twofold._core.device import MlaDecode, MlaPages, MlaRows
from twofold.blocks import ops
from twofold.blocks.attention.chosen import ChosenPositions, position_lists
from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.query_scale import QueryScale
from twofold.blocks.attention.rotation import PAIRED, Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Selection, SelectionOnDevice
from twofold.blocks.block import BlockPart, ComposedBlock, Cost, Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import (
    Allocate,
    DeviceBlock,
    DeviceState,
    DeviceStep,
    DeviceWeights,
    NativeKernels,
)
from twofold.weights.tensor_spec import HasTensor
from twofold.weights.weight_format import SCALE_GRID, WeightMatrix, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor


_PLAIN = ("f32", "bf16", "f16")
_KERNEL_LATENT: Final = 512
"""Elements of a latent that a device's kernels can have (`kMlaMaxLatent`); longer ones are computed in torch."""


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
    bias: bool = False
    """Whether the projections from the hidden state and the output projection have biases; q_proj has none."""
    rotation: Rotation | None = PAIRED
    """As published; some checkpoints pair halves. None: the keys that heads share carry no positions."""
    scale: QueryScale | None = None
    select: Selection = field(default_factory=AllPositions)
    key_norm: bool = False
    """Whether the key that heads share has a norm before its rotation."""
    gate: Gate | None = None
    """Gate of the heads' values, from the block's input; None: they have none."""
    latent_scale: float = 1.0
    """Factor of the normed latents."""
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
        if self.rotation is not None and self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, rotary embeddings need an even one"

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        names, heads, latent = LayerNames(self.layer), self.num_heads, self.kv_lora_rank
        hidden, of = self.hidden_size, LayerNames(self.layer).matrix
        first, rows, theirs = "q_proj", heads * self.qk_head_dim, "attn_q"
        if self.q_lora_rank is not None:
            first, rows, theirs = "q_a_proj", self.q_lora_rank, "attn_q_a"
        project = {
            "norm": names.input_norm(hidden),
            "q": of(first, theirs, rows, hidden),
            "kv": of("kv_a_proj_with_mqa", "attn_kv_a_mqa", self.cached, hidden),
        }
        if self.gate is not None:
            project |= self.gate.tensors(names, hidden, heads, self.v_head_dim)
        if self.bias and self.q_lora_rank is not None:
            project["q_bias"] = names.bias(first, theirs, rows)
        if self.bias:
            project["kv_bias"] = names.bias("kv_a_proj_with_mqa", "attn_kv_a_mqa", self.cached)
        expand = {}
        if self.q_lora_rank is not None:
            expand["q_norm"] = names.norm("q_a_layernorm", "attn_q_a_norm", rows)
            expand["q_b"] = of("q_b_proj", "attn_q_b", heads * self.qk_head_dim, rows)
        out = {"o": of("o_proj", "attn_output", hidden, heads * self.v_head_dim)}
        if self.bias:
            out["o_bias"] = names.bias("o_proj", "attn_output", hidden)
        # As published; or by head, with the keys' part transposed, as in newer GGUF files. Quantising skips the tensor:
        # absorbed matrices are multiplied with its columns, not with its rows.
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        kv_b = of("kv_b_proj", "attn_kv_b", heads * (nope + value), latent, role="exact")
        k_b = of("k_b_proj", "attn_k_b", heads, latent, nope, role="exact")
        v_b = of("v_b_proj", "attn_v_b", heads, value, latent, role="exact")
        by_head = found(k_b) and not found(kv_b)
        latent_norm = {"latent_norm": names.norm("kv_a_layernorm", "attn_kv_a_norm", latent)}
        if self.key_norm:
            latent_norm["key_norm"] = names.norm(
                "k_rope_only_layernorm", "attn_k_norm", self.qk_rope_head_dim
            )
        return (
            BlockPart("project", project),
            BlockPart("norm", latent_norm),
            BlockPart("expand", expand),
            BlockPart("absorb", {"k_b": k_b, "v_b": v_b} if by_head else {"kv_b": kv_b}),
            BlockPart("rotate", settings=self.rotation),
            BlockPart("scale", settings=self.scale),
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
        return Pages(1, self.cached), *(Pages(*plane) for plane in self.select.planes)

    @property
    def device_elements_per_token(self) -> int:
        heads = self.num_heads * (self.qk_head_dim + 2 * self.cached)
        return heads + self.select.device_elements_per_token

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
        return Linear(("q", "kv") if self.gate is None else ("q", "kv", "gate"), "norm", self.eps)

    @property
    def expand(self) -> Linear:
        """Queries from their low-rank part."""
        return Linear(("q_b",), "q_norm", self.latent_eps)

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
        where = f"layer {self.layer}, attention"
        absorbed = functools.cache(lambda: self.absorbed(weights, pool))
        name = f"layer {self.layer}: {{}}, absorbed"
        nope, stride = self.qk_nope_head_dim, self.qk_nope_head_dim + self.v_head_dim
        begins = range(0, self.num_heads * stride, stride) if "kv_b" in weights else ()
        keys = weights.pack(
            pool,
            where,
            name.format("keys"),
            lambda: absorbed()[0],
            by_head=True,
            rows=[("kv_b", range(begin, begin + nope)) for begin in begins],
            transposed=True,
        )
        values = weights.pack(
            pool,
            where,
            name.format("values"),
            lambda: absorbed()[1],
            by_head=True,
            rows=[("kv_b", range(begin + nope, begin + stride)) for begin in begins],
        )
        return ops.Mla(
            pool,
            layer=self.layer,
            num_heads=self.num_heads,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            project=self.project.cpu(weights, pool, where),
            q_b=self.expand.cpu(weights, pool, where) if "q_b" in weights else None,
            latent_norm=norm_part(
                weights.vector("latent_norm") * np.float32(self.latent_scale), self.latent_eps
            ),
            key_norm=norm_part(weights.optional_vector("key_norm"), self.latent_eps),
            k_b=keys,
            v_b=values,
            rotation=None if self.rotation is None else self.rotation.cpu(),
            scale=None if self.scale is None else self.scale.cpu(),
            select=self.select.cpu(weights, pool),
            scores=self.scores.cpu(weights),
            gate=None if self.gate is None else self.gate.cpu(self.v_head_dim),
            out=Linear(("o",)).cpu(weights, pool, where),
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        if "kv_b" in weights.source:
            both = weights.matrix("kv_b")
            rows = np.arange(len(both)).reshape(self.num_heads, nope + value)
            k_b, v_b = (
                weights.by_head(both, rows[:, :nope]),
                weights.by_head(both, rows[:, nope:], is_transposed=True),
            )
        else:
            k_b, v_b = (weights.stack(part).transpose(1, 2).contiguous() for part in ("k_b", "v_b"))
        return MlaOnDevice(
            self,
            project=self.project.device(weights),
            expand=self.expand.device(weights) if "q_b" in weights.source else None,
            latent_norm=weights.norm("latent_norm") * self.latent_scale,
            key_norm=weights.vector("key_norm"),
            k_b=k_b,
            v_b=v_b,
            select=self.select.device(weights),
            out=Linear(("o",)).device(weights),
            sinks=weights.vector("sinks"),
        )

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        latents = allocate((num_pages, page_size, self.cached))
        return latents, *self.select.device_state(num_pages, page_size, allocate)


@dataclass(frozen=True)
class MlaOnDevice:
    """MLA device operator, absorbed for every row as on the CPU. Without native kernels, plain torch (the
    reference)."""

    shape: Mla
    project: LinearOnDevice
    expand: LinearOnDevice | None
    """Queries from their low-rank part; None: they have none."""
    latent_norm: Tensor
    """Times `latent_scale`."""
    key_norm: Tensor | None
    k_b: Tensor
    """[heads, nope, latent]."""
    v_b: Tensor
    """[heads, latent, value]."""
    select: SelectionOnDevice
    out: LinearOnDevice
    sinks: Tensor | None = None
    """f32 [heads]."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch

        shape = self.shape
        a = self.project(hidden)
        end = a.shape[1] - shape.gate_rows
        q, compressed, gates = a[:, : end - shape.cached], a[:, end - shape.cached : end], a[:, end:]
        if self.key_norm is not None:
            key = compressed[:, shape.kv_lora_rank :]
            key.copy_(
                torch.nn.functional.rms_norm(key.float(), key.shape[1:], self.key_norm, shape.latent_eps)
            )
        if self.expand is not None:
            q = self.expand(q.float())
        q = q.reshape(len(q), shape.num_heads, shape.qk_head_dim).contiguous()
        absorbed = q.new_empty((len(q), shape.num_heads, shape.cached))
        latents = torch.bmm(q[..., : shape.qk_nope_head_dim].transpose(0, 1), self.k_b)
        absorbed[..., : shape.kv_lora_rank] = latents.transpose(0, 1)
        self._store(compressed, q, absorbed, state[0], step)
        chosen = self.select.prepare(hidden, a, state[1:], step)
        if shape.scale is not None:
            absorbed *= shape.scale.factors(step.batch.positions)[:, None, None].to(absorbed.dtype)
        values = torch.bmm(self._attended(absorbed, state[0], step, chosen).transpose(0, 1), self.v_b)
        values = values.transpose(0, 1)
        if shape.gate is not None:
            values = shape.gate.apply(values, gates.view(*values.shape[:2], -1))
        total += self.out(values.flatten(1))

    def _store(self, compressed: Tensor, q: Tensor, absorbed: Tensor, kept: Tensor, step: DeviceStep) -> None:
        """Write normalised latents and rotated keys to the cache, and rotated query parts after the absorbed
        queries."""
        import torch

        shape, native, rotation = self.shape, self._native(step), self.shape.rotation
        cos, sin = (None, None) if rotation is None else rotation.angles(step)
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
                neighbours=rotation is not None and rotation.neighbours,
                slot_mapping=step.batch.slot_mapping,
            )
            native.device.mla_store(of_batch, self._pages(kept), absorbed=absorbed, stream=native.stream())
            return
        latent, key = compressed[:, : shape.kv_lora_rank].float(), compressed[:, shape.kv_lora_rank :].float()
        latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], self.latent_norm, shape.latent_eps)
        queries = q[..., shape.qk_nope_head_dim :].float()
        if rotation is not None and cos is not None and sin is not None:
            key = rotation.rotated(key, cos, sin)
            queries = rotation.rotated(queries, cos[:, None], sin[:, None])
        rows = torch.cat([latent, key], 1).to(kept.dtype)
        slots = step.batch.slot_mapping
        kept.view(-1, shape.cached)[slots[slots >= 0]] = rows[slots >= 0]
        absorbed[..., shape.kv_lora_rank :] = queries.to(absorbed.dtype)

    def _attended(
        self, absorbed: Tensor, kept: Tensor, step: DeviceStep, chosen: ChosenPositions | None
    ) -> Tensor:
        """Weighted latents [T, heads, latent]. Leading sequences of one token each share a launch."""

        batch, native, shape = step.batch, self._native(step), self.shape
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
                rule=shape.scores.native,
                select=shape.select.native,
                sinks=self.sinks,
                chosen=position_lists(chosen),
            )
            workspace, pages = native.workspace(num_bytes, absorbed.device), self._pages(kept)
            native.device.mla_decode(decode, pages, workspace=workspace, out=out, stream=native.stream())
        elif num_decode > 0:
            lengths = batch.seq_lens[:num_decode].tolist()
            others = [*((s, slice(s, s + 1)) for s, length in enumerate(lengths) if length > 0), *others]
        for s, rows in others:
            length = int(batch.seq_lens[s]) if s < num_decode else batch.host_seq_lens[s]
            used = batch.page_tables[s, : -(-length // kept.shape[1])].long()
            latents = kept[used].flatten(0, 1)[:length].to(absorbed.dtype)[:, None]
            seen = shape.select.seen(batch.positions[rows], length, batch.ends_of(rows))
            if chosen is not None:
                seen = chosen.of(rows).within(seen, shape.num_heads)
            values = latents[..., : shape.kv_lora_rank]
            out[rows] = shape.scores.attended(absorbed[rows], latents, values, seen, sinks=self.sinks)
        return out

    def _native(self, step: DeviceStep) -> NativeKernels | None:
        return step.kernels.native if self.shape.kv_lora_rank <= _KERNEL_LATENT else None

    def _pages(self, kept: Tensor) -> MlaPages:
        shape = self.shape
        return MlaPages(
            rows=kept, page_size=kept.shape[1], latent=shape.kv_lora_rank, rope=shape.qk_rope_head_dim
        )
