"""The modules of a model, which rules are about: embedding, every block of every layer, head, with the names that
Hugging Face gives what they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from twofold.blocks.block import Block, BlockWeights, ExpertBlock, ModelPart
from twofold.models.model_files import ModelFiles

CLASSES: Final = (
    "attention", "gqa", "mla", "gated_delta", "short_convolution", "router", "experts", "shared_experts", "dense",
    "ffn", "norm", "embedding", "head",
)  # fmt: skip
"""What a rule may call a class: what a block is to a model (attention), or which block it is (gqa)."""


@dataclass(frozen=True, eq=False)
class Module:
    """One of them, with its tensors in an opened checkpoint."""

    name: str
    """E.g. model.layers.3.mlp.experts, lm_head."""
    part: ModelPart
    weights: BlockWeights
    layer: int | None
    """None for embedding and head."""
    moe_layer: int | None = None
    """Of routed experts: the layer's number among those that have any."""

    @property
    def classes(self) -> frozenset[str]:
        """What rules may call it, of `CLASSES`."""
        block = type(self.part).__module__.rpartition(".")[2] if isinstance(self.part, Block) else ""
        return frozenset((self.part.kind, block)) & frozenset(CLASSES)

    @property
    def formats(self) -> tuple[str, ...]:
        """Of its weights as they are in memory, without norms, biases and what else must be exact."""
        if isinstance(self.part, ExpertBlock):
            return tuple(sorted(set(self.part.expert_formats(self.weights))))
        return tuple(sorted({self.weights.format(part) for part in self.recodable}))

    @property
    def recodable(self) -> tuple[str, ...]:
        """Of its tensors, those that may be of another format."""
        return tuple(part for part, spec in self.weights.specs.items() if spec.role != "exact")

    @property
    def host_bytes(self) -> int:
        return self.part.host_bytes(self.weights)


def modules_of(files: ModelFiles) -> list[Module]:
    """In the order of `ModelFiles.parts`. Nothing is read but headers."""
    config = files.config
    moe_layers = {layer: index for index, layer in enumerate(config.moe_layers)}
    found = []
    for part, weights in files.parts():
        layer = part.layer if isinstance(part, Block) else None
        of_experts = moe_layers[layer] if isinstance(part, ExpertBlock) and layer is not None else None
        found.append(Module(_name(part, weights), part, weights, layer, of_experts))
    return found


def _name(part: ModelPart, weights: BlockWeights) -> str:
    """Of one matrix alone its own, and of vectors the first's, else the one that most of its matrices lie in."""
    if part.kind == "head":
        return "lm_head"  # also where it is the embedding
    if isinstance(part, ExpertBlock):
        return part.stacked_experts(weights)[0].name.rpartition(".")[0]
    matrices = [spec for spec in weights.specs.values() if len(spec.shape) > 1] or list(
        weights.specs.values()
    )
    names = [spec.name.removesuffix(".weight") for spec in matrices]
    if len(names) == 1 or len(matrices[0].shape) < 2:
        return names[0]
    ((name, _),) = Counter(name.rpartition(".")[0] for name in names).most_common(1)
    return name
