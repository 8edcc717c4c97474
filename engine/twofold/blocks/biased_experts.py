"""gpt-oss's routed experts: gate, up and down with biases, gate and up interleaved.

Checkpoints have all experts of a layer in fused tensors with interleaved gate and up rows: MXFP4 as in transformers
(`gate_up_proj_blocks` [E, 2I, H] and `down_proj_blocks` [E, H, I], `weights/mxfp4_tensors.py`), or floats, transposed
(`gate_up_proj` [E, H, 2I], `down_proj` [E, I, H]). GGUF files and `twofold quantize` stack each matrix by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import FusedForm
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.experts import PARTS, RoutedExperts, TransposedExperts
from twofold.weights.mxfp4_tensors import BLOCKS
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import ExpertWeights, WeightMatrix

_FLOATS: Final = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class BiasedExperts(RoutedExperts):
    @property
    def has_biases(self) -> bool:
        return True

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm(interleaved=True, transposed=True)

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        module = self.modules[-1]
        stacked, blocks, transposed = (
            self._stacked(module),
            self._transposed_specs(BLOCKS),
            self._transposed_specs(""),
        )
        if found(stacked["gate"]) or found(stacked["up"]):
            return stacked | self._stacked_biases(module)
        fused = transposed if found(transposed["gate_up"]) else blocks
        hf, sizes = self._name(module), {"gate_up": 2 * self.intermediate_size, "down": self.hidden_size}
        return fused | {
            f"{part}_bias": TensorSpec(f"{hf}.{part}_proj_bias", (self.num_experts, size), "exact", "")
            for part, size in sizes.items()
        }

    def check(self, weights: BlockWeights) -> None:
        super().check(weights)
        for part, spec in weights.specs.items():
            format = weights.format(part)
            transposed = (
                part in ("gate_up", "down") and "gate" not in weights and not spec.name.endswith(BLOCKS)
            )
            if (transposed or part.endswith("_bias")) and format not in _FLOATS:
                raise ModelLoadError(
                    f"{weights.source.where}: tensor {spec.name} is {format}, expected one of {', '.join(_FLOATS)}; "
                    "convert the checkpoint again"
                )

    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        if "gate" in weights:
            return super().experts(weights)
        both, down = weights.stack("gate_up"), weights.stack("down")
        if weights.specs["gate_up"].name.endswith(BLOCKS):
            return [(*_gate_and_up(one), below) for one, below in zip(both, down, strict=True)]
        return TransposedExperts(both, down, _gate_and_up)

    def biases(self, weights: BlockWeights) -> F32:
        if "gate" in weights:
            return np.concatenate([weights.vector(f"{part}_bias") for part in PARTS], axis=1)
        both = weights.vector("gate_up_bias")
        return np.concatenate([both[:, 0::2], both[:, 1::2], weights.vector("down_bias")], axis=1)

    def stacked_biases(self, weights: BlockWeights) -> tuple[TensorSpec, ...]:
        return tuple(self._stacked_biases(self.modules[-1]).values())

    def _transposed_specs(self, suffix: str) -> dict[str, TensorSpec]:
        """Specs of the fused tensors; GGUF files have none."""
        module = self.modules[-1]
        hf, inner, hidden = self._name(module), self.intermediate_size, self.hidden_size
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        missing = self._stacked(module)["gate"].gguf
        return {
            part: TensorSpec(
                f"{hf}.{part}_proj{suffix}",
                (self.num_experts, *(shape if suffix else shape[::-1])),
                "matrix",
                missing if part == "gate_up" else "",
            )
            for part, shape in shapes.items()
        }

    def _stacked_biases(self, module: str) -> dict[str, TensorSpec]:
        hf, gguf = self._name(module), f"blk.{self.layer}"
        return {
            f"{part}_bias": TensorSpec(
                f"{hf}.{part}_proj_bias",
                (self.num_experts, self._shape(part)[0]),
                "exact",
                f"{gguf}.ffn_{part}_exps.bias",
            )
            for part in PARTS
        }

    def _name(self, module: str) -> str:
        return f"model.layers.{self.layer}.{module}.experts"


def _gate_and_up(both: WeightMatrix) -> tuple[WeightMatrix, WeightMatrix]:
    return both.every_other(0), both.every_other(1)
