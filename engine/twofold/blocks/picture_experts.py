"""ERNIE-4.5-VL's experts: those of text, and as many of another size for tokens of pictures, numbered after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from twofold.blocks.block import Cost, RoutedShape, ShapeOf
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.picture_router import PICTURES, gates_of_pictures
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import ExpertWeights, LayerFormats, formats_by_expert, layer_formats

_PREFIX = "pictures."


@dataclass(frozen=True)
class PictureExperts(RoutedExperts):
    picture_size: int = 0
    """Intermediate size of the experts of pictures."""

    @property
    def text(self) -> RoutedExperts:
        """The experts of text."""
        return RoutedExperts(**{each.name: getattr(self, each.name) for each in fields(RoutedExperts)})

    @property
    def pictures(self) -> RoutedExperts:
        """The experts of pictures."""
        return replace(
            self.text,
            intermediate_size=self.picture_size,
            modules=(PICTURES, *self.modules),
            first=self.num_experts,
        )

    def as_stored(self, shape_of: ShapeOf) -> RoutedExperts:
        """These experts; those of text alone if the checkpoint has no gate of pictures."""
        sees = any(shape_of(name) is not None for name in gates_of_pictures(self.layer))
        return self if sees else self.text

    @property
    def routed(self) -> RoutedShape:
        return replace(super().routed, num_experts=2 * self.num_experts, second_half=self.picture_size)

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        own = self.pictures.tensors(found)
        return self.text.tensors(found) | {f"{_PREFIX}{role}": spec for role, spec in own.items()}

    def of_one_size(self, weights: BlockWeights) -> Sequence[tuple[RoutedExperts, BlockWeights]]:
        own = {
            role.removeprefix(_PREFIX): spec
            for role, spec in weights.specs.items()
            if role.startswith(_PREFIX)
        }
        text = {role: spec for role, spec in weights.specs.items() if not role.startswith(_PREFIX)}
        return (self.text, weights.having(text)), (self.pictures, weights.having(own))

    def expert_formats(self, weights: BlockWeights) -> LayerFormats:
        return layer_formats(
            formats
            for block, own in self.of_one_size(weights)
            for formats in formats_by_expert(block.expert_formats(own), self.num_experts)
        )

    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        return [expert for block, own in self.of_one_size(weights) for expert in block.experts(own)]

    def stacked_experts(self, weights: BlockWeights) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        (text, own), _ = self.of_one_size(weights)
        return text.stacked_experts(own)

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """That of tokens of text."""
        (text, own), _ = self.of_one_size(weights)
        return text.cost(own, tokens, context_len)
