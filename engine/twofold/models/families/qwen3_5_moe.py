"""Qwen3.5-MoE and Qwen3.6-MoE: Qwen3-Next with separate projections; the text part of multimodal models.

Reference: transformers `models/qwen3_5_moe`. GGUF files call it "qwen35moe". For text, the three positions of its
rotation are equal, so it is plain RoPE. The vision tower is ignored.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import qwen3_next
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_CLASS: Final = "Qwen3_5MoeForCausalLM"
_RENAMED: Final = (("model.language_model.", "model."),)


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    is_text = "text_config" not in fields.data and config_json.architecture_name(fields) == _CLASS
    of_text = fields if is_text else text_fields(fields, _CLASS)
    if not of_text.boolean("attn_output_gate", True):
        raise of_text.error("attn_output_gate", False, "true, the only supported value")
    # Every layer has experts: keys of other layers do not count.
    every_layer = {"mlp_only_layers": None, "decoder_sparse_step": None}
    of_text = of_text.defaulting(defaults_of("qwen3_5_moe_text"))
    config = qwen3_next.parse_config(of_text.with_data(of_text.data | every_layer), generation)
    return without_images(config, _RENAMED, "model.visual.*")


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "qwen35moe" in config.json's format. Raises ModelLoadError naming file and key."""
    settings = qwen3_next.gguf_settings(metadata)
    return settings | {"model_type": "qwen3_5_moe_text", "tiled_value_heads": True}
