"""ERNIE-4.5-VL's router: tokens of pictures have a gate of their own, and other experts than those of text.

As published, gates are [hidden, experts] and the biases of both are rows of one matrix; transformers may write them
apart. Quantised text alone has one gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import Cost, ShapeOf
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, Routed
from twofold.blocks.router import Gate, Router, RouterOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

PICTURES: Final = "mlp.vision_moe"
"""transformers' name of what tokens of pictures have instead of `mlp`."""
_OWN: Final = ("pictures_gate", "pictures_bias")


def gates_of_pictures(layer: int) -> tuple[str, str]:
    """Names of the second gate: as published, and as transformers has it."""
    return f"model.layers.{layer}.mlp.gate.weight_1", f"model.layers.{layer}.{PICTURES}.gate.weight"


@dataclass(frozen=True)
class PictureRouter(Router):
    published: bool = True
    """Whether the checkpoint has gates and biases as published, else as transformers names them."""
    sees: bool = True
    """Whether there is the second gate."""

    def as_stored(self, shape_of: ShapeOf) -> PictureRouter:
        joint = f"model.layers.{self.layer}.{self.modules[0]}.{self.bias_name}"
        sees = any(shape_of(name) is not None for name in gates_of_pictures(self.layer))
        return replace(self, published=shape_of(joint) != (1, self.num_experts), sees=sees)

    @property
    def reads_pictures(self) -> bool:
        return self.sees

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        specs = super().tensors(found)
        gate, bias = specs["gate"], specs["bias"]
        published, apart = gates_of_pictures(self.layer)
        if self.published:
            gate = replace(gate, shape=gate.shape[::-1])
            specs |= {"gate": gate, "bias": replace(bias, shape=(2, self.num_experts))}
            return specs | ({_OWN[0]: replace(gate, name=published, gguf="")} if self.sees else {})
        if not self.sees:
            return specs
        name = f"{apart.removesuffix('weight')}{self.bias_name}"
        return specs | {
            _OWN[0]: replace(gate, name=apart, gguf=""),
            _OWN[1]: replace(bias, name=name, gguf=""),
        }

    def host_bytes(self, weights: BlockWeights) -> int:
        return 4 * ((1 + self.sees) * self.num_experts * (self.hidden_size + 1) + self.hidden_size)

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """That of tokens of text."""
        read = 4 * self.num_experts * self.hidden_size
        return Cost(read, 2.0 * tokens * self.num_experts * self.hidden_size, read)

    def _arguments(self, weights: BlockWeights, pool: ops.ThreadPool) -> dict[str, Any]:
        if not self.published:
            found = super()._arguments(weights, pool)
            if self.sees:
                found["pictures_bias"] = weights.vector("pictures_bias")
        else:
            own = weights.having({role: spec for role, spec in weights.specs.items() if role != "bias"})
            biases = ops.dequantise(pool, weights.checked(pool, "bias"))
            found = super()._arguments(own, pool) | {"bias": np.array(biases[0])}
            if self.sees:
                found["pictures_bias"] = np.array(biases[1])
        if self.sees:
            found["pictures_gate"] = self._gate(weights, pool, "pictures_gate")
        return found

    def _gate(self, weights: BlockWeights, pool: ops.ThreadPool, part: str = "gate") -> Gate:
        gate = ops.dequantise(pool, weights.checked(pool, part))
        return np.ascontiguousarray(gate.T) if self.published else gate

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        norm = weights.vector("norm")

        def made(gate: str, bias: Tensor | None) -> RouterOnDevice:
            matrix = weights.exact(gate)
            plain = matrix.T.contiguous() if self.published else matrix
            return RouterOnDevice(self, norm, plain, bias, None, None, None, moe_layer)

        biases = list(weights.exact("bias").clone()) if self.published else [weights.vector("bias")]
        text = made("gate", biases[0])
        if not self.sees:
            return text
        own = biases[1] if self.published else weights.vector("pictures_bias")
        return PictureRouterOnDevice(text, made("pictures_gate", own))


@dataclass(frozen=True)
class PictureRouterOnDevice:
    text: RouterOnDevice
    pictures: RouterOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """As `RouterOnDevice.forward`, of each row by its kind."""
        self.text.forward(hidden, total, state, step)
        if step.batch.pictures is None:
            return
        of_text, is_picture = step.chosen(), step.batch.pictures[:, None]
        self.pictures.forward(hidden, total, state, step)
        own = step.chosen()
        step.routed = Routed(
            own.normed,
            (own.ids + self.text.router.num_experts).where(is_picture, of_text.ids),
            own.weights.where(is_picture, of_text.weights),
        )

    def look(self, hidden: Tensor) -> Tensor:
        """Router logits f32 [T, experts] of tokens of text, as low as can be for experts of pictures."""
        import torch

        logits = self.text.look(hidden)
        return torch.cat([logits, torch.full_like(logits, torch.finfo(logits.dtype).min)], 1)
