"""A family that a `Decoder` describes, with the interface of a family's module (`registry.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twofold.models import decoder_gguf, decoder_layers
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.decoder import Decoder
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


@dataclass(frozen=True)
class DecoderFamily:
    decoder: Decoder

    def parse_config(self, fields: Fields, generation: GenerationDefaults) -> ModelConfig:
        """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
        return decoder_layers.parse_config(self.decoder, fields, generation)

    def gguf_settings(self, metadata: GgufMetadata) -> dict[str, Any]:
        """A GGUF file's header in config.json's format. Raises ModelLoadError naming file and key."""
        return decoder_gguf.gguf_settings(self.decoder, metadata)
