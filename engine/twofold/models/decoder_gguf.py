"""Header of a GGUF file as the settings of a family that a `Decoder` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twofold.models import config_json
from twofold.models.decoder import FULL, SLIDING, Decoder
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import of_gguf
from twofold.weights.json_file import Fields

_MIXTURE: Final = (
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_shared_experts",
    "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
)  # fmt: skip


def gguf_settings(decoder: Decoder, metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file's header in config.json's format. Raises ModelLoadError naming file and key."""
    settings = {"model_type": decoder.model_type, "values_of_gguf": True}
    if decoder.gguf_whole is not None:
        return settings | decoder.gguf_whole(metadata)
    defaults = defaults_of(decoder.model_type)
    attention = metadata.attention(
        windows="sliding_window" in defaults, partly_rotated=True, uneven=decoder.uneven
    )
    settings |= attention
    if attention.get("sliding_window") is not None and (
        decoder.gguf_period is not None or "attention.sliding_window_pattern" in metadata.fields.data
    ):
        slides = metadata.slides(decoder.gguf_period or 0, full_first=decoder.gguf_full_first)
        settings["layer_types"] = [SLIDING if slide else FULL for slide in slides]
    if FULL in defaults.get("rope_parameters", ()):  # by kind of layer
        settings["rope_parameters"] = _rotations(metadata, attention)
    if decoder.router is not None and any(map(metadata.has_gate, range(metadata.num_layers))):
        settings |= _mixture(decoder, metadata)
    else:
        settings |= of_gguf(metadata.fields, "intermediate_size")
    return settings | decoder.gguf(metadata)


def _mixture(decoder: Decoder, metadata: GgufMetadata) -> dict[str, Any]:
    assert decoder.router is not None
    metadata.expect_score(decoder.gguf_score or decoder.router.get("score", "softmax"))
    fields = metadata.fields
    if (
        decoder.inner == "intermediate_size" and "feed_forward_length" in fields.data
    ):  # as older files call it
        width = {"expert_feed_forward_length": fields.data["feed_forward_length"]}
        fields = Fields(fields.where, width | fields.data)
    mixture = of_gguf(fields, *_MIXTURE)
    width_of_one = mixture["shared_expert_intermediate_size"] == mixture["moe_intermediate_size"]
    if mixture["num_shared_experts"] and width_of_one:
        mixture["shared_expert_intermediate_size"] = 0
    layers = {"first_k_dense_replace": 0, **metadata.dense_layers()}
    return mixture | layers | {decoder.inner: mixture["moe_intermediate_size"]}


def _rotations(metadata: GgufMetadata, attention: Mapping[str, Any]) -> dict[str, Any]:
    """Rotations by kind of layer. As in llama.cpp, those of layers with a window are not scaled."""
    fields, head_dim = metadata.fields, attention["head_dim"]
    full = metadata.rope_parameters()
    theta = fields.number("rope.freq_base_swa", full["rope_theta"] or 10_000.0, above=True)
    rotated = fields.integer("rope.dimension_count", head_dim, maximum=head_dim)
    sliding = fields.integer("rope.dimension_count_swa", rotated, maximum=head_dim)
    return {
        FULL: full | {"partial_rotary_factor": config_json.rotary_share(rotated, head_dim)},
        SLIDING: {"rope_theta": theta, "partial_rotary_factor": config_json.rotary_share(sliding, head_dim)},
    }
