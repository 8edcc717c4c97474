"""Kimi-K2.5 and later: the text part, a DeepSeek-V3 with a nested configuration; the vision tower is ignored.

Reference: transformers `models/kimi_k25`. Kimi-K2's own files name DeepSeek-V3. GGUF files call both "deepseek2".
"""

from __future__ import annotations

from typing import Final

from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.families import deepseek
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_RENAMED: Final = (("language_model.", ""), ("model.language_model.", "model."))
_OF_IMAGES: Final = ("vision_tower.*", "mm_projector.*", "model.vision_tower.*", "model.mm_projector.*")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    config = deepseek.parse_config(text_fields(fields, "DeepseekV3ForCausalLM"), generation)
    return without_images(config, _RENAMED, *_OF_IMAGES)
