"""Qwen3.5-MoE and Qwen3.6-MoE: Qwen3-Next with separate projections; the text part of multimodal models.

Reference: transformers `models/qwen3_5_moe`. GGUF files call it "qwen35moe". For text, the three positions of its
rotation are equal, so it is plain RoPE. The vision tower is ignored.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.families import qwen3_next
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_CLASS: Final = "Qwen3_5MoeForCausalLM"
_RENAMED: Final = (("model.language_model.", "model."),)


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    is_text = "text_config" not in fields.data and common.architecture_name(fields) == _CLASS
    of_text = fields if is_text else text_fields(fields, _CLASS)
    if not of_text.boolean("attn_output_gate", True):
        raise of_text.error("attn_output_gate", False, "true, the only supported value")
    num_layers = of_text.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    renormalise = of_text.boolean("norm_topk_prob", True)
    config = qwen3_next.read(of_text, generation, set(range(num_layers)), renormalise)
    return without_images(config, _RENAMED, "model.visual.*")


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "qwen35moe". Raises ModelLoadError naming the file and the key."""
    return qwen3_next.read_gguf(metadata, _CLASS, tiled=True)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format, see `qwen3_next.config_fields`."""
    return qwen3_next.config_fields(config, where) | {"model_type": "qwen3_5_moe_text"}
