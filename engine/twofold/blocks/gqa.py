"""Grouped-query attention with a paged KV cache, composed of the parts in `blocks.attention`.

Project, norm, rotate, scale, store, select, attend, gate, out: each is a field, in this order. A family sets those that
differ from the defaults (`blocks.block.changed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

from twofold.blocks import ops
from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear
from twofold.blocks.attention.norms import NO_NORMS, HeadNorms
from twofold.blocks.attention.projections import Heads, Projections
from twofold.blocks.attention.query_scale import QueryScale
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Selection
from twofold.blocks.block import BlockPart, ComposedBlock, Cost, Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceWeights, HeadShape
from twofold.blocks.gqa_device import GqaOnDevice
from twofold.weights.tensor_spec import HasTensor

_KERNEL_SIZES: Final = (64, 128, 256, 512)
"""Elements of a head for which there are device kernels (kernels/device/dense_layer.h)."""


@dataclass(frozen=True)
class Gqa(ComposedBlock):
    """Grouped-query attention; field names follow Hugging Face where they are clear."""

    kind: ClassVar[str] = "attention"
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    zero_centred: bool = False
    """Whether checkpoints store the norms minus 1."""
    project: Projections = field(default_factory=Projections)
    norms: HeadNorms = NO_NORMS
    rotation: Rotation | None = field(default_factory=Rotation)
    """None: queries and keys carry no positions."""
    scale: QueryScale | None = None
    """Factor of queries by position; None: none."""
    select: Selection = field(default_factory=AllPositions)
    scores: Scores = field(default_factory=Scores)
    gate: Gate | None = None
    o_bias: bool = False
    """Whether the output projection has a bias."""

    @property
    def heads(self) -> Heads:
        value_dim = self.project.v_head_dim or self.head_dim
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, value_dim)

    @property
    def value_dim(self) -> int:
        return self.heads.value_dim

    @property
    def own_kv(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.project.kv_layer is None

    @property
    def device_head_dim(self) -> int:
        """Elements of a head on a device: a size that kernels have, where heads are padded because of their values."""
        fitting = (size for size in _KERNEL_SIZES if size >= self.head_dim)
        return self.head_dim if self.value_dim == self.head_dim else next(fitting, self.head_dim)

    @property
    def gate_rows(self) -> int:
        """Rows of all heads' gates in a projection of their own."""
        return 0 if self.gate is None else self.num_heads * self.gate.rows(self.value_dim)

    @property
    def interleaved_gate(self) -> bool:
        """Whether q_proj has each head's gate after its query."""
        return self.gate is not None and not self.gate.module

    def problems(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd, rotary embeddings need an even one"
        if not self.own_kv and self.select.planes:
            yield f"layer {self.layer} has no keys of its own, from which its positions would be chosen"
        if self.value_dim > self.head_dim:
            yield f"v_head_dim {self.value_dim} is more than head_dim {self.head_dim}"
        pairs_neighbours = self.rotation is not None and self.rotation.neighbours
        if self.value_dim != self.head_dim and (self.norms != NO_NORMS or pairs_neighbours):
            yield f"v_head_dim {self.value_dim} differs from head_dim {self.head_dim} where heads have norms"

    @property
    def names(self) -> LayerNames:
        return LayerNames(self.layer, zero_centred=self.zero_centred)

    @property
    def linear(self) -> Linear:
        """The projections as one product."""
        gate = ("gate",) if self.gate_rows else ()
        return Linear((*self.project.matrices, *gate), "norm", self.eps)

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        names, hidden, heads = self.names, self.hidden_size, self.heads
        q_rows, kv_rows = (1 + self.interleaved_gate) * heads.num * heads.dim, heads.num_kv * heads.dim
        flat = self.norms.qk == "flat"
        widths = {"q": q_rows if flat else heads.dim, "k": kv_rows if flat else heads.dim}
        widths = {part: size for part, size in widths.items() if part in self.project.matrices}
        gate = {} if self.gate is None else self.gate.tensors(names, hidden, heads.num, heads.value_dim)
        out = {"o": names.matrix("o_proj", "attn_output", hidden, heads.num * heads.value_dim)}
        if self.o_bias:
            out["o_bias"] = names.bias("o_proj", "attn_output", hidden)
        return (
            BlockPart("project", self.project.tensors(found, names, hidden, heads, q_rows), self.project),
            BlockPart(
                "norm", self.norms.tensors(names, widths), None if self.norms == NO_NORMS else self.norms
            ),
            BlockPart("rotate", settings=self.rotation),
            BlockPart("scale", settings=self.scale),
            BlockPart("select", self.select.tensors(found, names, hidden), self.select),
            BlockPart("attend", self.scores.tensors(names, heads.num), self.scores, self._per_position),
            BlockPart("gate", gate, self.gate),
            BlockPart("out", out),
        )

    @property
    def _per_position(self) -> Cost:
        keys_and_values = 2 * self._device_row_elements  # bytes: a device keeps bf16
        return Cost(keys_and_values, 2.0 * self.num_heads * (self.head_dim + self.value_dim))

    @property
    def state(self) -> tuple[Pages, ...]:
        if not self.own_kv:
            return ()
        chooser = tuple(Pages(*plane) for plane in self.select.planes)
        if self.value_dim == self.head_dim:
            return (Pages(2 * self.num_kv_heads, self.head_dim), *chooser)
        return Pages(self.num_kv_heads, self.head_dim), Pages(self.num_kv_heads, self.value_dim), *chooser

    @property
    def state_layer(self) -> int:
        return self.layer if self.project.kv_layer is None else self.project.kv_layer

    @property
    def bidirectional_pictures(self) -> bool:
        return self.select.bidirectional

    @property
    def device_page_elements(self) -> int:
        chooser = sum(planes * elements for planes, elements in self.select.planes)
        return self._device_row_elements + chooser if self.own_kv else 0

    @property
    def _device_row_elements(self) -> int:
        """Elements of one token's keys and values on a device."""
        return 2 * self.num_kv_heads * self.device_head_dim

    @property
    def device_elements_per_token(self) -> int:
        gates = 2 * (self.gate is not None)
        heads = ((1 + gates) * self.num_heads + 2 * self.num_kv_heads) * self.device_head_dim
        return heads + self.select.device_elements_per_token

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes; biases are bf16 there, and norms have weights."""
        biases = sum(spec.shape[0] for part, spec in weights.specs.items() if part.endswith("_bias"))
        biases -= self.linear.padded_bias_rows(weights)
        unit = 4 * self.head_dim * (self.norms.qk == "unit" or self.norms.v)
        return super().device_bytes(weights) - 2 * biases + unit

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        seen = [self.select.num_before(context_len + token) for token in range(tokens)]
        read, pairs = min(context_len, seen[0] if seen else 0), sum(seen)
        each, scan = self._per_position, self.select.scan(tokens, context_len)
        return Cost(
            base.num_bytes + read * each.num_bytes + scan.num_bytes,
            base.flops + pairs * each.flops + scan.flops,
        )

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, attention"
        scale = {} if self.scale is None else self.scale.cpu(weights)
        q_norm, k_norm, v_norm = self.norms.cpu(weights, self.head_dim, self.value_dim, self.eps)
        return ops.Gqa(
            pool,
            layer=self.state_layer,
            heads=self.project.cpu(self.heads),
            project=self.linear.cpu(weights, pool, where),
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            flat_norms=self.norms.qk == "flat",
            rotation=None if self.rotation is None else self.rotation.cpu(),
            scale=scale | {"elements": self.norms.query_factors(weights)},
            select=self.select.cpu(weights, pool),
            scores=self.scores.of(self.head_dim).cpu(weights),
            gate=None if self.gate is None else self.gate.cpu(self.value_dim),
            out=Linear(("o",)).cpu(weights, pool, where),
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        project, factors = self.linear.device(weights), self.norms.query_factors(weights.source)
        if self.rotation is not None and self.rotation.neighbours:
            values = self.num_kv_heads * self.value_dim if "v" in self.project.matrices else 0
            project = project.in_halves(weights, self.head_dim, values + self.gate_rows)
        return GqaOnDevice(
            self,
            HeadShape(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.device_head_dim,
                epsilon=self.norms.eps or self.eps,
                select=self.select,
                scores=self.scores.of(self.head_dim),
            ),
            project=project,
            norms=self.norms.device(weights, self.head_dim),
            query_factors=None if factors is None else torch.from_numpy(factors).to(project.weight.device),
            select=self.select.device(weights),
            sinks=weights.vector("sinks"),
            out=Linear(("o",)).device(weights),
        )

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        if not self.own_kv:
            return ()
        shape = (num_pages, page_size, self.num_kv_heads, self.device_head_dim)
        return allocate(shape), allocate(shape), *self.select.device_state(num_pages, page_size, allocate)
