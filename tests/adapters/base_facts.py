"""Facts about an opened model, as readers of adapters need them."""

from __future__ import annotations

from itertools import chain

from twofold.adapters.base_shapes import BaseExperts, BaseShapes
from twofold.blocks.biased_experts import BiasedExperts
from twofold.blocks.experts import RoutedExperts
from twofold.models.model_files import ModelFiles


def base_of(files: ModelFiles, *, architecture: str = "") -> BaseShapes:
    """Matrices and routed experts of a model; `architecture`: general.architecture of its GGUF files."""
    specs = list(chain.from_iterable(weights.specs.values() for _, weights in files.parts()))
    experts = {}
    for block, weights in files.blocks():
        if isinstance(block, RoutedExperts):
            first, where = next(iter(weights.specs.values())).name, f"model.layers.{block.layer}"
            module = next(
                each for each in block.modules if first.startswith(f"{where}.{each}".removesuffix("."))
            )
            experts[".".join(part for part in (where, module, "experts") if part)] = BaseExperts(
                block.num_experts,
                block.hidden_size,
                block.intermediate_size,
                interleaved=isinstance(block, BiasedExperts),
                transposed=block.transposed or isinstance(block, BiasedExperts),
            )
    return BaseShapes.of_specs(specs, experts, renamed=files.config.renamed, architecture=architecture)
