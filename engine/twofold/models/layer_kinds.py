"""Configuration of layers with sliding-window and full attention that also differ in size or rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import RopeConfig
from twofold.models.config import ModelConfig, read_rope, rotary_share
from twofold.weights.json_file import Fields

SLIDING, FULL = "sliding_attention", "full_attention"
_PROPORTIONAL: Final = "proportional"
_NEVER_TURNS: Final = 1e20
"""Frequency factor from which on a GGUF file means an unrotated pair."""


def read_layer_rope(fields: Fields, kind: str, usual: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    """The section of `rope_parameters` for layers of `kind`; without one `usual`, which also gives the default theta.

    Raises ModelLoadError.
    """
    sections = fields.section("rope_parameters")
    section = None if sections is None else sections.section(kind)
    if section is None:
        return usual
    if section.text("rope_type", "default") != _PROPORTIONAL:
        alone = Fields(section.where, {"rope_parameters": section.data})
        return read_rope(alone, default_theta=usual.theta, max_position_embeddings=max_position_embeddings)
    return RopeConfig(
        _PROPORTIONAL,
        section.number("rope_theta", usual.theta, above=True),
        section.number("factor", 1.0, above=True),
        share=section.number("partial_rotary_factor", 1.0, maximum=1.0),
    )


def read_full_sizes(fields: Fields, full: set[int]) -> tuple[int, int | None]:
    """head_dim and, if different, key heads of the layers `full`. Raises ModelLoadError.

    Published files have `global_head_dim`; transformers writes the sizes of each layer that has its own.
    """
    own = fields.section("per_layer_config")
    if own is None:
        shared = fields.boolean("attention_k_eq_v", False)
        kv_heads = fields.optional_integer("num_global_key_value_heads", minimum=1) if shared else None
        return fields.integer("global_head_dim", 512), kv_heads
    first = own.section(str(min(full)))
    if first is None or own.data != {str(layer): first.data for layer in full}:
        raise fields.error(
            "per_layer_config", own.data, "one for all layers with full attention and no others"
        )
    return first.integer("head_dim"), first.optional_integer("num_key_value_heads", minimum=1)


def with_share(rope: RopeConfig, dim: int) -> RopeConfig:
    """A GGUF file's rotation, converted to a rotated share if its factors keep pairs from turning; others unchanged."""
    factors = np.array(rope.frequency_factors)
    turning = int(np.sum(factors == 1.0))
    if turning == len(factors) or not np.all(factors[turning:] >= _NEVER_TURNS):
        return rope
    return RopeConfig(_PROPORTIONAL, rope.theta, share=rotary_share(2 * turning, dim))


def kind_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """Fields for the functions above, from a GGUF file's configuration. Raises ModelLoadError for other layers."""
    attention = config.blocks_of(Gqa)
    kinds = [FULL if block.sliding_window is None else SLIDING for block in attention]
    of_kind = dict(zip(kinds, attention, strict=True))
    alike = all(
        replace(block, layer=of_kind[kind].layer) == of_kind[kind]
        for kind, block in zip(kinds, attention, strict=True)
    )
    if not alike or len(of_kind) < 2 or kinds[-1] != FULL:
        raise ModelLoadError(
            f"{where}: attention is not one of two kinds in turn, of which the last layer's is full; give the Hugging "
            "Face checkpoint instead"
        )
    sliding, full = of_kind[SLIDING], of_kind[FULL]
    own = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
    ropes = zip((SLIDING, FULL), config.rotations, strict=True)
    return {
        "num_attention_heads": sliding.num_heads, "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_dim, "sliding_window": sliding.sliding_window, "layer_types": kinds,
        "attention_k_eq_v": full.keys_are_values,
        "per_layer_config": {str(layer): own for layer, kind in enumerate(kinds) if kind == FULL},
        "rope_parameters": {kind: _rope_fields(rope) for kind, (rope, _) in ropes},
    }  # fmt: skip


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    said = {"rope_type": rope.kind, "rope_theta": rope.theta}
    return said | ({"partial_rotary_factor": rope.share} if rope.kind == _PROPORTIONAL else {})
