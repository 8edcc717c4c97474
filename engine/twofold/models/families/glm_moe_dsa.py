"""GLM-5: DeepSeek-V3's blocks while the context is no longer than what its sparse attention chooses (`index_topk`).

Reference: transformers `models/glm_moe_dsa`. See `deepseek_v32.py`. GGUF files call it "glm-dsa".
"""

from __future__ import annotations

from typing import Any

from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek_v32
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    return deepseek_v32.without_indexer(fields, generation, defaults_of("glm_moe_dsa"))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "glm-dsa" in config.json's format. Raises ModelLoadError naming file and key."""
    return deepseek_v32.gguf_of_sparse(metadata, "GlmMoeDsaForCausalLM", "glm_moe_dsa")
