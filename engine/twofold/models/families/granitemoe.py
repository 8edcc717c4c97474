"""Granite with experts (1B-A400M, 3B-A800M), with and without shared ones: multipliers, softmax over the chosen.

Reference: transformers `models/granitemoe` and `models/granitemoeshared`. Defaults below are those of their
configurations. GGUF files call both "granitemoe".

The layers' outputs are multiplied by the residual multiplier m. Every layer reads the residual stream through a norm,
so dividing the embeddings by m and the norms' epsilon by m² is equivalent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_MODULES: Final = ("block_sparse_moe",)
_FUSED: Final = (
    ("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"),
)  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("granitemoe"))
    config_json.read_activation(fields)
    residual = fields.number("residual_multiplier", minimum=1e-6)
    attention = config_json.read_attention(fields)
    attention = replace(
        attention,
        eps=attention.eps / residual**2,
        multiplier=fields.optional_number("attention_multiplier", above=True),
        gguf_pairs_neighbours=True,
    )
    router, experts = config_json.read_mixture(fields, attention, intermediate="intermediate_size")
    router = replace(
        router,
        renormalise=False,
        score="softmax_of_chosen",
        modules=_MODULES,
        gates=("router", "router.layer"),
    )
    experts = replace(experts, modules=_MODULES, fused=_FUSED)
    width = fields.integer("shared_intermediate_size", minimum=0)
    fused = ("input_linear", "output_linear")
    shared = (SharedExperts(0, attention.hidden_size, width, "shared_mlp", fused=fused),) if width else ()
    layer = (attention, router, *shared, experts)
    config = config_json.read_model(fields, generation, attention, lambda n: layer)
    of_rows = fields.number("embedding_multiplier", above=True) / residual
    of_logits = 1.0 / fields.number("logits_scaling", above=True)
    return replace(
        config, embedding=replace(config.embedding, scale=of_rows), head=replace(config.head, scale=of_logits)
    )


def gguf_settings(metadata: GgufMetadata, *, windows: bool = False) -> dict[str, Any]:
    """A GGUF file of architecture "granitemoe" in config.json's format. Raises ModelLoadError naming file and key.

    windows: it may have a sliding window.
    """
    fields = metadata.fields
    fields.only("rope.scaling.finetuned", True)
    attention = metadata.attention(windows=windows)
    shared = fields.integer("expert_shared_feed_forward_length", 0, minimum=0)
    multiplier = fields.number("attention.scale", 0.0) or attention["head_dim"] ** -0.5
    return {
        "architectures": [f"GraniteMoe{'Shared' if shared else ''}ForCausalLM"],
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **attention,
        **metadata.experts("num_local_experts", "feed_forward_length", intermediate="intermediate_size"),
        "shared_intermediate_size": shared,
        "attention_multiplier": multiplier,
        "embedding_multiplier": fields.number("embedding_scale", 1.0, above=True),
        "residual_multiplier": fields.number("residual_scale", 1.0, minimum=1e-6),
        "logits_scaling": fields.number("logit_scale", 1.0, above=True),
    }
