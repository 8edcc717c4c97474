"""A.X-K1: DeepSeek-V3 with a norm of the experts' output.

Reference: transformers `models/axk1`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twofold.blocks.block import Block, ExpertBlock
from twofold.blocks.post_norm import PostNorm
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek, glm4_moe_lite
from twofold.weights.json_file import Fields

_NORM: Final = "post_mlp_layernorm"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("axk1"))
    has_kinds = fields.data.get("mlp_layer_types") is not None
    parse = glm4_moe_lite.parse_config if has_kinds else deepseek.parse_config
    config = parse(fields, generation)
    return replace(
        config,
        layers=tuple(_normed(layer, config) for layer in config.layers),
        renamed=((f"*.mlp.{_NORM}", f"*.{_NORM}"),),
    )


def _normed(layer: tuple[Block, ...], config: ModelConfig) -> tuple[Block, ...]:
    """A layer with the norm of what follows its attention, if that has experts."""
    if not any(isinstance(block, ExpertBlock) for block in layer):
        return layer
    norm = PostNorm(layer[0].layer, config.hidden_size, config.head.eps, _NORM, "", over=len(layer) - 1)
    return (*layer, norm)
