"""GLM-4.5, 4.6, 4.7 and Air: grouped-query attention of which a share of each head is rotated, DeepSeek-V3's router.

Reference: transformers `models/glm4_moe`. GGUF files call it "glm4moe".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("glm4_moe"))
    config_json.read_activation(fields)
    attention = replace(
        config_json.read_attention(fields), o_bias=False, qk_norm=fields.boolean("use_qk_norm", False)
    )
    layer_of = deepseek.read_layers(fields, attention, "post_attention_norm", has_bias=True)
    config = config_json.read_model(fields, generation, attention, layer_of, rotated_share=0.5)
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    return config.predicting(fields.where, count, layer_of(config.num_layers))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "glm4moe" in config.json's format. Raises ModelLoadError naming file and key."""
    metadata.expect_score("sigmoid")
    return {
        "model_type": "glm4_moe",
        **metadata.attention(partly_rotated=True),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        **deepseek.gguf_mixture(metadata, num_shared=1, num_dense=1, renormalise=True),
    }
