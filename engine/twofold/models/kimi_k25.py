"""Kimi-K2.5 and later: the text part, a DeepSeek-V3 whose configuration is nested; what sees is not read.

Reference: transformers `models/kimi_k25`. Kimi-K2 itself is written as DeepSeek-V3. GGUF files call both "deepseek2".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twofold.models import config as common
from twofold.models import deepseek
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.weights.json_file import Fields

parse_gguf, config_fields = deepseek.parse_gguf, deepseek.config_fields

_RENAMED: Final = (("language_model.", ""), ("model.language_model.", "model."))
_OF_IMAGES: Final = ("vision_tower.*", "mm_projector.*", "model.vision_tower.*", "model.mm_projector.*")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", None, "the settings of the text part")
    common.read_quantization(text)
    outer = {key: fields.data[key] for key in common.OUTER_KEYS if key in fields.data}
    data = outer | text.data | {"architectures": ["DeepseekV3ForCausalLM"]}
    config = deepseek.parse_config(Fields(text.where, data), generation)
    return replace(config, renamed=_RENAMED, ignored=(*config.ignored, *_OF_IMAGES))
