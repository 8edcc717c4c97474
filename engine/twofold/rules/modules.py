"""Modules of a model, to which rules apply: embedding, every block of every layer, head, with Hugging Face's names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from twofold.blocks.block import Block, ExpertBlock, ModelPart
from twofold.blocks.block_weights import BlockWeights
from twofold.models.model_files import ModelFiles
from twofold.weights.weight_format import distinct_formats

CLASSES: Final = (
    "attention", "gqa", "mla", "gated_delta", "short_convolution", "router", "experts", "shared_experts", "dense",
    "ffn", "norm", "residual", "embedding", "head",
)  # fmt: skip
"""Class names in rules: a block's kind (attention), or its type (gqa)."""


@dataclass(frozen=True, eq=False)
class Module:
    """One module, with its tensors in an opened checkpoint."""

    name: str
    """E.g. model.layers.3.mlp.experts, lm_head."""
    part: ModelPart
    weights: BlockWeights
    layer: int | None
    """None for embedding and head."""
    moe_layer: int | None = None
    """Index among the layers with routed experts; None for other modules."""

    @property
    def classes(self) -> frozenset[str]:
        """Class names that match it in rules, from `CLASSES`."""
        block = type(self.part).__module__.rpartition(".")[2] if isinstance(self.part, Block) else ""
        return frozenset((self.part.kind, block)) & frozenset(CLASSES)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of its weights in memory, excluding norms, biases and other exact tensors."""
        if isinstance(self.part, ExpertBlock):
            return tuple(sorted(set().union(*distinct_formats(self.part.expert_formats(self.weights)))))
        return tuple(sorted({self.weights.format(part) for part in self.recodable}))

    @property
    def recodable(self) -> tuple[str, ...]:
        """Tensors that may have another format."""
        return tuple(part for part, spec in self.weights.specs.items() if spec.role != "exact")

    @property
    def host_bytes(self) -> int:
        return self.part.host_bytes(self.weights)


def modules_of(files: ModelFiles) -> list[Module]:
    """Modules in the order of `ModelFiles.parts`. Reads headers only."""
    config = files.config
    moe_layers = {layer: index for index, layer in enumerate(config.moe_layers)}
    found = []
    for part, weights in files.parts():
        layer = part.layer if isinstance(part, Block) else None
        of_experts = moe_layers[layer] if isinstance(part, ExpertBlock) and layer is not None else None
        found.append(Module(_name(part, weights), part, weights, layer, of_experts))
    return found


def _name(part: ModelPart, weights: BlockWeights) -> str:
    """A single matrix's own name; for vectors alone the first one's; else the prefix of most of its matrices."""
    if part.kind == "head":
        return "lm_head"  # also if it is the embedding
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
