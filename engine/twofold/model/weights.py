"""A planned model's dense weights, read once into memory of their own; experts are only viewed.

Dense matrices are read on every token, so they are copied out of the page cache into arrays aligned for the vector
units (q, k and v concatenated on the way). An untied embedding stays a view of the file: a token reads one row of it.
Experts are handed out as views, because the expert store makes the one packed copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from twofold.model.checkpoint import Weight
from twofold.model.model_files import ModelFiles
from twofold.model.weight_plan import AttentionPlan, DensePlan, FusedExperts, MoePlan, TensorSpec

F32 = npt.NDArray[np.float32]
ExpertWeights = tuple[Weight, Weight, Weight]
"""(gate [I, H], up [I, H], down [H, I])."""

_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True)
class LoadProgress:
    """How far loading has come. The totals cover the whole stage and never change during it."""

    stage: Literal["dense weights", "experts"]
    current: str
    """The tensor or layer just done."""
    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int


ProgressFn = Callable[[LoadProgress], None]


@dataclass(frozen=True)
class AttentionWeights:
    """Norms and biases float32; matrices as in the file."""

    norm: F32
    qkv: Weight
    """[(num_heads + 2 num_kv_heads) * head_dim, hidden]."""
    qkv_bias: F32 | None
    q_norm: F32 | None
    k_norm: F32 | None
    o: Weight
    o_bias: F32 | None


@dataclass(frozen=True)
class DenseFfnWeights:
    norm: F32
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class RouterWeights:
    norm: F32
    gate: Weight
    """[num_experts, hidden]."""


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights
    feed_forward: DenseFfnWeights | RouterWeights


@dataclass(frozen=True)
class DenseWeights:
    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: F32
    lm_head: Weight
    """The embedding itself when tied."""


def read_dense_weights(files: ModelFiles, progress: ProgressFn | None = None) -> DenseWeights:
    """Read everything but the experts. Raises ModelLoadError; `progress` is called after every tensor."""
    return _Reader(files, progress).read()


def expert_weights(files: ModelFiles, layer: int) -> list[ExpertWeights]:
    """The experts of model layer `layer`: views of the mapped file, or float32 copies of float16.

    All of one dtype (`make_plan` sees to that). Raises ValueError for a layer without experts.
    """
    checkpoint = files.checkpoint
    ffn = files.plan.layers[layer].feed_forward
    if not isinstance(ffn, MoePlan):
        raise ValueError(f"layer {layer} is a dense layer, it has no experts")
    if isinstance(ffn.experts, FusedExperts):
        gate_up = checkpoint.tensor(ffn.experts.gate_up.name, ffn.experts.gate_up.shape)
        down = checkpoint.tensor(ffn.experts.down.name, ffn.experts.down.shape)
        inner = gate_up.shape[1] // 2
        experts = [(gate_up[e, :inner], gate_up[e, inner:], down[e]) for e in range(len(gate_up))]
    else:
        experts = [
            (
                checkpoint.tensor(gate.name, gate.shape),
                checkpoint.tensor(up.name, up.shape),
                checkpoint.tensor(down.name, down.shape),
            )
            for gate, up, down in ffn.experts.experts
        ]
    return experts


def as_float32(weight: Weight) -> F32:
    """A float32 copy, exact: bfloat16 bits are the upper half of a float32."""
    if weight.dtype == np.uint16:
        return (weight.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array(weight, np.float32)


class _Reader:
    """Reads the plan's dense tensors in file order of the layers, counting as it goes."""

    def __init__(self, files: ModelFiles, progress: ProgressFn | None) -> None:
        self._plan = files.plan
        self._checkpoint = files.checkpoint
        self._progress = progress
        self._tensors_total = 0
        self._bytes_total = 0
        for spec in files.plan.dense_tensors():
            self._tensors_total += 1
            self._bytes_total += files.checkpoint.entry(spec.name).num_bytes
        self._tensors_done = 0
        self._bytes_done = 0

    def read(self) -> DenseWeights:
        plan = self._plan
        embedding = self._tensor(plan.embedding) if plan.lm_head is not None else self._matrix(plan.embedding)
        layers = tuple(
            LayerWeights(self._attention(layer.attention), self._feed_forward(layer.feed_forward))
            for layer in plan.layers
        )
        return DenseWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._vector(plan.final_norm),
            lm_head=embedding if plan.lm_head is None else self._matrix(plan.lm_head),
        )

    def _attention(self, plan: AttentionPlan) -> AttentionWeights:
        norm = self._vector(plan.norm)
        qkv = self._concatenated((plan.q, plan.k, plan.v))
        o = self._matrix(plan.o)
        biases = [self._vector(spec) for spec in plan.biases]
        head_norms = [self._vector(spec) for spec in plan.head_norms]
        return AttentionWeights(
            norm=norm,
            qkv=qkv,
            qkv_bias=np.concatenate(biases[:3]) if biases else None,
            q_norm=head_norms[0] if head_norms else None,
            k_norm=head_norms[1] if head_norms else None,
            o=o,
            o_bias=biases[3] if biases else None,
        )

    def _feed_forward(self, plan: DensePlan | MoePlan) -> DenseFfnWeights | RouterWeights:
        if isinstance(plan, MoePlan):
            return RouterWeights(norm=self._vector(plan.norm), gate=self._matrix(plan.router))
        norm, gate, up = self._vector(plan.norm), self._matrix(plan.gate), self._matrix(plan.up)
        if gate.dtype != up.dtype:  # they are read together
            gate, up = as_float32(gate), as_float32(up)
        return DenseFfnWeights(norm=norm, gate=gate, up=up, down=self._matrix(plan.down))

    def _tensor(self, spec: TensorSpec) -> Weight:
        """A view of the file (float16: a float32 copy)."""
        tensor = self._checkpoint.tensor(spec.name, spec.shape)
        self._tensors_done += 1
        self._bytes_done += self._checkpoint.entry(spec.name).num_bytes
        if self._progress is not None:
            self._progress(
                LoadProgress(
                    stage="dense weights",
                    current=spec.name,
                    bytes_done=self._bytes_done,
                    bytes_total=self._bytes_total,
                    tensors_done=self._tensors_done,
                    tensors_total=self._tensors_total,
                )
            )
        return tensor

    def _vector(self, spec: TensorSpec) -> F32:
        """Norm weights and biases: small, so always float32 (exact)."""
        return as_float32(self._tensor(spec))

    def _matrix(self, spec: TensorSpec) -> Weight:
        return self._concatenated((spec,))

    def _concatenated(self, specs: Sequence[TensorSpec]) -> Weight:
        """The matrices stacked by rows in one aligned array; float32 if they are not all of one dtype."""
        parts = [self._tensor(spec) for spec in specs]
        shape = (sum(len(part) for part in parts), parts[0].shape[1])
        if len({part.dtype for part in parts}) > 1:
            parts = [as_float32(part) for part in parts]
        matrix = _empty_aligned(shape, parts[0].dtype)
        np.concatenate(parts, out=matrix)
        return matrix


def _empty_aligned(shape: tuple[int, int], dtype: np.dtype[np.float32] | np.dtype[np.uint16]) -> Weight:
    """An uninitialised array that begins on a cache line."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT_BYTES
    matrix: Weight = raw[begin : begin + num_bytes].view(dtype).reshape(shape)
    return matrix
