"""DeepSeek-V3.2: DeepSeek-V3 while the context is no longer than what its sparse attention chooses (`index_topk`).

Reference: transformers `models/deepseek_v32`. GGUF files call it "deepseek32". Up to that length the indexer chooses
every position, so it is left out; the context ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek, glm4_moe_lite
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import Settings, of_gguf
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    return without_indexer(fields, generation, defaults_of("deepseek_v32"))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "deepseek32" in config.json's format. Raises ModelLoadError naming file and key."""
    return gguf_of_sparse(metadata, "DeepseekV32ForCausalLM", "deepseek_v32")


def gguf_of_sparse(metadata: GgufMetadata, architecture: str, model_type: str) -> dict[str, Any]:
    """The same of any family with this indexer."""
    known = {"architectures": [architecture], "model_type": model_type}
    return deepseek.gguf_settings(metadata) | known | of_gguf(metadata.fields, "index_topk")


def without_indexer(
    fields: Fields, generation: GenerationDefaults, defaults: Mapping[str, Any]
) -> ModelConfig:
    """The model without its indexer, with a context of `index_topk` positions."""
    fields = fields.defaulting(defaults)
    fields.only("rope_interleave", True, None)
    has_kinds = fields.data.get("mlp_layer_types") is not None
    parse = glm4_moe_lite.parse_config if has_kinds else deepseek.parse_config
    config = parse(fields, generation)
    limit = Settings(fields).integer("index_topk")
    why = (
        f"the context ends at {limit} positions: beyond index_topk the model attends to chosen positions only, which "
        "is not supported"
    )
    names = ("model.layers.*.self_attn.indexer.*", "blk.*.indexer.*")
    indexer = (("sparse attention's indexer", name) for name in names)
    return replace(
        config, left_out=(*config.left_out, *indexer), context_limit=limit, context_limit_reason=why
    )
