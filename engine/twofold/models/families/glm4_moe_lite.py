"""GLM-4.7-Flash: DeepSeek-V3's blocks under another name.

Reference: transformers `models/glm4_moe_lite`. GGUF files call it "deepseek2", like DeepSeek's models.
"""

from __future__ import annotations

from typing import Any

from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.families import deepseek
from twofold.weights.json_file import Fields

parse_gguf = deepseek.parse_gguf


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    kinds = fields.data.get("mlp_layer_types")
    said = kinds or ["dense"] + ["sparse"] * (num_layers - 1)
    dense = said.index("sparse") if isinstance(said, list) and "sparse" in said else 0
    if said != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise fields.error(
            "mlp_layer_types", kinds, f"'dense' of the first, 'sparse' of the others of {num_layers} layers"
        )
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 202_752}
    data = defaults | fields.data | {"first_k_dense_replace": dense}
    return deepseek.parse_config(Fields(fields.where, data), generation)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format."""
    dense = config.moe_layers[0]
    return deepseek.config_fields(config, where) | {
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_layers - dense),
    }
