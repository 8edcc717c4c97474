"""GLM-4.7-Flash: DeepSeek-V3's blocks under another name.

Reference: transformers `models/glm4_moe_lite`. GGUF files call it "deepseek2", like DeepSeek's models.
"""

from __future__ import annotations

from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.config_json import num_layers_of
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("glm4_moe_lite")).naming({"qk_rope_head_dim": ("head_dim",)})
    num_layers, kinds = num_layers_of(fields), fields.data.get("mlp_layer_types")
    types = kinds or ["dense"] + ["sparse"] * (num_layers - 1)
    dense = types.index("sparse") if isinstance(types, list) and "sparse" in types else num_layers
    if types != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise fields.error(
            "mlp_layer_types", kinds, f"'dense' of the first, 'sparse' of the others of {num_layers} layers"
        )
    changed = {"first_k_dense_replace": dense}
    return deepseek.parse_config(fields.with_data(fields.data | changed), generation)
