"""Per-layer input embeddings (Gemma 4 E2B and E4B): every layer has an input of its own beside the residual stream.

`LayerInputs` belongs to the model's embedding: a token's inputs of all layers are a row of a second table plus a
projection of its embedding (`table_inputs.py`). `LayerInput` is the block that adds one layer's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.table_inputs import I64, HostInputs, TableInputs
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LayerInputs(TableInputs):
    """Inputs of all layers: (norm(projection . embedding / sqrt(hidden)) + row of the table * sqrt(size)) / sqrt(2)."""

    num_layers: int
    size: int
    """Elements of one layer's input."""
    vocab_size: int
    hidden_size: int
    eps: float
    padding_token: int = 0
    """The token whose row of the table a picture's rows have."""

    @property
    def media_token(self) -> int:
        return self.padding_token

    @property
    def width(self) -> int:
        """Elements of all layers' inputs."""
        return self.num_layers * self.size

    @property
    def table_scale(self) -> float:
        return float(self.size**0.5)

    @property
    def unscaled_eps(self) -> float:
        """Epsilon of the norm without the projection's factor, 1 / sqrt(hidden), which the norm cancels otherwise."""
        return self.eps * self.hidden_size

    def problems(self, vocab_size: int) -> Iterator[str]:
        if self.vocab_size < vocab_size:
            yield f"vocab_size_per_layer_input {self.vocab_size} is less than vocab_size {vocab_size}"

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        table, wide = (self.vocab_size, self.width), (self.width, self.hidden_size)
        return {
            "layer_table": TensorSpec(
                "model.embed_tokens_per_layer.weight", table, "embedding", "per_layer_token_embd.weight"
            ),
            "layer_projection": TensorSpec(
                "model.per_layer_model_projection.weight", wide, "matrix", "per_layer_model_proj.weight"
            ),
            "layer_norm": TensorSpec(
                "model.per_layer_projection_norm.weight", (self.size,), "exact", "per_layer_proj_norm.weight"
            ),
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> HostInputs:
        (table,) = self.row_tables(weights, pool)
        projected = ops.LayerInputs(
            pool,
            table=table,
            projection=weights.packed(pool, "embedding, inputs of the layers", "layer_projection"),
            norm_weight=weights.vector("layer_norm"),
            eps=self.unscaled_eps,
            table_scale=self.table_scale,
        )
        return _ProjectedInputs(table, projected)

    def device(self, weights: DeviceWeights) -> LayerInputsOnDevice:
        """Copy the weights to the device. Needs torch."""
        return LayerInputsOnDevice(
            self,
            weights.matrix("layer_table"),
            weights.matrix("layer_projection"),
            weights.norm("layer_norm"),
        )


class _ProjectedInputs(HostInputs):
    def __init__(self, table: ops.RowTable, projected: ops.LayerInputs) -> None:
        super().__init__([table])
        self._projected = projected

    def rows(self, ids: I64) -> list[I64]:
        return [ids]

    def forward(self, ids: I64, hidden: F32 | None, out: F32) -> None:
        assert hidden is not None, "inputs of layers without the embeddings"
        self._projected.forward(ids, hidden, out)


@dataclass(frozen=True)
class LayerInputsOnDevice:
    inputs: LayerInputs
    table: Tensor
    """bf16 [vocabulary, width]."""
    projection: Tensor
    norm: Tensor

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """f32 [T, width] of f32 [T, hidden], the scaled embeddings."""
        from torch.nn import functional

        shape = (len(token_ids), self.inputs.num_layers, self.inputs.size)
        projected = functional.linear(hidden.bfloat16(), self.projection).float().view(shape)
        normed = functional.rms_norm(projected, shape[-1:], self.norm, self.inputs.unscaled_eps)
        rows = self.table[token_ids].float().view(shape)
        return ((normed + rows * self.inputs.table_scale) * float(0.5**0.5)).flatten(1)


@dataclass(frozen=True)
class LayerInput(Block):
    """Adds projection . (gelu(gate . hidden) * the layer's input); a norm of the output follows."""

    kind: ClassVar[str] = "dense"

    hidden_size: int
    size: int
    """Elements of the layer's input."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        return {
            "gate": TensorSpec(
                f"{hf}.per_layer_input_gate.weight",
                (self.size, self.hidden_size),
                "matrix",
                f"{gguf}.inp_gate.weight",
            ),
            "projection": TensorSpec(
                f"{hf}.per_layer_projection.weight",
                (self.hidden_size, self.size),
                "matrix",
                f"{gguf}.proj.weight",
            ),
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, its own input"
        return ops.LayerInput(
            pool,
            gate=weights.packed(pool, where, "gate"),
            projection=weights.packed(pool, where, "projection"),
            first=self.layer * self.size,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return LayerInputOnDevice(weights.matrix("gate"), weights.matrix("projection"), self.layer)


@dataclass(frozen=True)
class LayerInputOnDevice:
    gate: Tensor
    projection: Tensor
    layer: int

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        from torch.nn import functional

        inputs = step.batch.layer_inputs
        assert inputs is not None, "a layer's input without the embedding's"
        gate = functional.gelu(functional.linear(hidden.bfloat16(), self.gate).float(), approximate="tanh")
        first, size = self.layer * gate.shape[1], gate.shape[1]
        gated = (gate * inputs[:, first : first + size]).bfloat16()
        total += functional.linear(gated, self.projection)
