"""MiniMax-M2: norms of queries and keys over all heads together, partial rotation, sigmoid scores with a bias.

Reference: transformers `models/minimax_m2`. GGUF files call it
"minimax-m2". Checkpoints call the experts' matrices w1 (gate), w3 (up) and w2 (down) under `block_sparse_moe`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families.mixtral import MODULES, PROJECTIONS
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_ONLY: Final = {
    "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "shared_intermediate_size": 0,
}  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("minimax_m2"))
    config_json.read_activation(fields)
    for key, value in _ONLY.items():
        fields.only(key, value)
    attention = replace(config_json.read_attention(fields), qk_norm=True, flat_norms=True)
    head_dim = attention.head_dim
    rotated = fields.integer("rotary_dim", head_dim, maximum=head_dim)
    router, experts = config_json.read_mixture(fields, attention, intermediate="intermediate_size")
    router = replace(
        router,
        renormalise=True,
        score="sigmoid",
        bias=True,
        bias_name="e_score_correction_bias",
        modules=MODULES,
    )
    experts = replace(experts, modules=MODULES, projections=PROJECTIONS)
    config = config_json.read_model(
        fields,
        generation,
        attention,
        lambda n: (attention, router, experts),
        rotated_share=rotated / head_dim,
    )
    # No published checkpoint has the weights of its prediction layers, so their layout is not known.
    return config.predicting(fields.where, fields.optional_integer("num_mtp_modules") or 0)


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "minimax-m2" in config.json's format. Raises ModelLoadError naming file and key."""
    metadata.expect_score("sigmoid")
    return {
        "model_type": "minimax_m2",
        "scoring_func": "sigmoid",
        **metadata.attention(partly_rotated=True),
        **metadata.experts("num_local_experts", intermediate="intermediate_size"),
    }
