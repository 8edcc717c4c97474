"""Granite with experts and windows: sinks, windows in three of four layers, a rotation for each layer or none.

Reference: transformers `models/granitemoe_swa`. Defaults below are those of `GraniteMoeSWAConfig`.
GGUF files call it "granite_swa".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.gqa import Gqa
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.families import granitemoe
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    config = granitemoe.parse_config(fields, generation)
    windows = config_json.read_layer_types(fields, "sliding_attention", lambda n: n % 4 != 0)
    window = fields.integer("sliding_window", 128)
    thetas = _thetas(fields, config)
    others = [theta for theta in dict.fromkeys(thetas) if theta not in (0.0, config.rope.theta)]
    turned = [config.rope.theta, *others]

    def with_window(n: int, layer: tuple[Block, ...]) -> tuple[Block, ...]:
        attention, *rest = layer
        assert isinstance(attention, Gqa)
        rotation = turned.index(thetas[n]) if thetas[n] else 0
        own = replace(attention, sinks=True, rotated=thetas[n] > 0, rotation=rotation)
        return (replace(own, sliding_window=window if n in windows else None), *rest)

    return replace(
        config,
        layers=tuple(with_window(n, layer) for n, layer in enumerate(config.layers)),
        further_rotations=tuple((replace(config.rope, theta=theta), config.rope_dim) for theta in others),
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "granite_swa" in config.json's format. Raises ModelLoadError naming file and key."""
    if not metadata.fields.data.get("expert_count"):
        raise ModelLoadError(
            f"{metadata.file.path}: has no experts, expected granite_swa with experts (GraniteMoeSWAForCausalLM), the "
            "only ones whose layers are described here; see `twofold models`"
        )
    settings = granitemoe.gguf_settings(metadata, windows=True)
    key = f"{metadata.file.fields['general.architecture']}.attention.rope_pattern"
    turned = metadata.of_layers("attention.rope_pattern") if key in metadata.file.fields else ()
    theta = metadata.rope_parameters()["rope_theta"] or 10_000.0
    return settings | {
        "architectures": ["GraniteMoeSWAForCausalLM"],
        "model_type": "granitemoe_swa",
        "layer_types": [
            "sliding_attention" if slide else "full_attention"
            for slide in metadata.slides(4, full_first=True)
        ],
        "layer_rope_theta": [theta if turn else 0 for turn in turned[: metadata.num_layers]] or None,
    }


def _thetas(fields: Fields, config: ModelConfig) -> list[float]:
    """RoPE base of each layer; 0: the layer has no rotation."""
    listed = fields.data.get("layer_rope_theta")
    if listed is None:
        return [config.rope.theta] * config.num_layers
    numbers = isinstance(listed, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < 1e30 for each in listed
    )
    if not numbers or len(listed) != config.num_layers:
        raise fields.error("layer_rope_theta", listed, f"0 or a base for each of {config.num_layers} layers")
    return [float(each) for each in listed]
