"""A planned model's weights as views of the mapped files; only norms and biases are copied.

Whoever computes with a matrix packs it for the kernels, once; a token's embedding is read from the file's own row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.blocks.weight_plan import (
    AttentionPlan,
    DensePlan,
    FusedExperts,
    MoePlan,
    StackedExperts,
    TensorSpec,
    expert_tensors,
)
from twofold.models.model_files import ModelFiles
from twofold.weights.tensor_source import TensorSource
from twofold.weights.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]
ExpertWeights = tuple[WeightMatrix, WeightMatrix, WeightMatrix]
"""(gate [I, H], up [I, H], down [H, I])."""


@dataclass(frozen=True)
class LoadProgress:
    """How far loading has come. The totals cover the whole stage and never change during it."""

    stage: Literal["dense weights", "experts"]
    current: str
    """What was just done: a layer, or the head."""
    bytes_done: int
    """Of the files."""
    bytes_total: int
    steps_done: int
    steps_total: int


ProgressFn = Callable[[LoadProgress], None]


@dataclass(frozen=True)
class AttentionWeights:
    """Norms and biases float32; matrices as in the file."""

    norm: F32
    qkv: tuple[WeightMatrix, WeightMatrix, WeightMatrix]
    """Each [heads * head_dim, hidden]; their formats may differ."""
    qkv_bias: F32 | None
    q_norm: F32 | None
    k_norm: F32 | None
    o: WeightMatrix
    o_bias: F32 | None


@dataclass(frozen=True)
class DenseFfnWeights:
    norm: F32
    gate: WeightMatrix
    up: WeightMatrix
    down: WeightMatrix


@dataclass(frozen=True)
class RouterWeights:
    norm: F32
    gate: WeightMatrix
    """[num_experts, hidden]."""


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights
    feed_forward: DenseFfnWeights | RouterWeights


@dataclass(frozen=True)
class DenseWeights:
    embedding: WeightMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: F32
    lm_head: WeightMatrix
    """The embedding itself when tied."""


def dense_weights(files: ModelFiles) -> DenseWeights:
    """Everything but the experts. Raises ModelLoadError."""
    plan, tensors = files.plan, files.tensors
    embedding = _matrix(tensors, plan.embedding)
    return DenseWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(_attention(tensors, layer.attention), _feed_forward(tensors, layer.feed_forward))
            for layer in plan.layers
        ),
        final_norm=_vector(tensors, plan.final_norm),
        lm_head=embedding if plan.lm_head is None else _matrix(tensors, plan.lm_head),
    )


def expert_weights(files: ModelFiles, layer: int) -> list[ExpertWeights]:
    """The experts of model layer `layer`; of one matrix all have the same format (`make_plan` sees to that).

    Raises ValueError for a layer without experts, ModelLoadError where fused experts cannot be told apart.
    """
    tensors = files.tensors
    ffn = files.plan.layers[layer].feed_forward
    if not isinstance(ffn, MoePlan):
        raise ValueError(f"layer {layer} is a dense layer, it has no experts")
    experts = ffn.experts
    if isinstance(experts, FusedExperts):
        inner = experts.gate_up.shape[1] // 2
        down = tensors.stack(experts.down.name, experts.down.shape)
        fused = tensors.stack(experts.gate_up.name, experts.gate_up.shape)
        try:
            halves = [(both.row_range(0, inner), both.row_range(inner, 2 * inner)) for both in fused]
        except ValueError as error:
            raise ModelLoadError(
                f"{tensors.where}: tensor {experts.gate_up.name} cannot be cut into gate and up: {error}; use a "
                "checkpoint with separate experts"
            ) from None
        return [(gate, up, matrix) for (gate, up), matrix in zip(halves, down, strict=True)]
    if isinstance(experts, StackedExperts):
        stacks = (tensors.stack(spec.name, spec.shape) for spec in (experts.gate, experts.up, experts.down))
        return list(zip(*stacks, strict=True))
    return [
        (_matrix(tensors, gate), _matrix(tensors, up), _matrix(tensors, down))
        for gate, up, down in experts.experts
    ]


def expert_layers(files: ModelFiles) -> Iterator[list[ExpertWeights]]:
    """`expert_weights` of all layers that have any, in turn, for who packs them.

    Copy a layer before asking for the next. The files' pages leave this process's memory after every layer, so that
    packing never holds the experts twice.
    """
    tensors, names = files.tensors, expert_names(files)
    for index, layer in enumerate(files.config.moe_layers):
        for ahead in names[index : index + 3]:
            tensors.will_read(ahead)
        yield expert_weights(files, layer)
        tensors.release_pages(names[index])


def expert_names(files: ModelFiles) -> list[list[str]]:
    """The tensors of each layer's experts, for the layers that have any."""
    return [
        with_companions(files.tensors, expert_tensors(ffn.experts))
        for plan in files.plan.layers
        if isinstance(ffn := plan.feed_forward, MoePlan)
    ]


def with_companions(tensors: TensorSource, specs: Iterable[TensorSpec]) -> list[str]:
    """Names of the tensors and of what belongs to them (scales)."""
    return [name for spec in specs for name in (spec.name, *tensors.companions(spec.name))]


def _attention(tensors: TensorSource, plan: AttentionPlan) -> AttentionWeights:
    biases = [_vector(tensors, spec) for spec in plan.biases]
    head_norms = [_vector(tensors, spec) for spec in plan.head_norms]
    return AttentionWeights(
        norm=_vector(tensors, plan.norm),
        qkv=(_matrix(tensors, plan.q), _matrix(tensors, plan.k), _matrix(tensors, plan.v)),
        qkv_bias=np.concatenate(biases[:3]) if biases else None,
        q_norm=head_norms[0] if head_norms else None,
        k_norm=head_norms[1] if head_norms else None,
        o=_matrix(tensors, plan.o),
        o_bias=biases[3] if biases else None,
    )


def _feed_forward(tensors: TensorSource, plan: DensePlan | MoePlan) -> DenseFfnWeights | RouterWeights:
    norm = _vector(tensors, plan.norm)
    if isinstance(plan, MoePlan):
        return RouterWeights(norm=norm, gate=_matrix(tensors, plan.router))
    return DenseFfnWeights(
        norm=norm,
        gate=_matrix(tensors, plan.gate),
        up=_matrix(tensors, plan.up),
        down=_matrix(tensors, plan.down),
    )


def _vector(tensors: TensorSource, spec: TensorSpec) -> F32:
    return tensors.vector(spec.name, (spec.shape[0],))


def _matrix(tensors: TensorSource, spec: TensorSpec) -> WeightMatrix:
    return tensors.matrix(spec.name, (spec.shape[0], spec.shape[1]))
