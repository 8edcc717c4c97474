"""Configurations of multimodal models with the text part, the only one that Twofold runs, in its own section."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twofold.models.config import ModelConfig
from twofold.models.picture_encoder import VISION_TOWER
from twofold.models.quantization import read_quantization
from twofold.weights.json_file import Fields

_OUTER: Final = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
)
"""Keys that may be beside the text part instead of in it."""


def text_fields(fields: Fields, architecture: str) -> Fields:
    """The settings of the text part, for a class named `architecture`. Raises ModelLoadError."""
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", None, "the settings of the text part")
    read_quantization(text)
    outer = {key: fields.data[key] for key in _OUTER if key in fields.data}
    return fields.with_data(outer | text.data | {"architectures": [architecture]}, text.where)


def without_images(config: ModelConfig, renamed: tuple[tuple[str, str], ...], *patterns: str) -> ModelConfig:
    """A text part with its checkpoint renames and the tensor patterns of the unsupported vision tower."""
    vision = tuple((VISION_TOWER, pattern) for pattern in patterns)
    return replace(config, renamed=renamed, left_out=(*config.left_out, *vision))
