"""gpt-oss: attention with sinks and biases, a window in every other layer; experts with biases and a clamped SwiGLU.

Reference: transformers `models/gpt_oss`. Defaults below are those of `GptOssConfig`. GGUF files call it "gpt-oss".
YaRN's range of dimensions is not rounded to whole ones (`truncate`); GGUF files have no key for that. llama.cpp rounds
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.biased_experts import BiasedExperts
from twofold.blocks.block import Block
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import RopeConfig
from twofold.blocks.router import Router
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALPHA: Final = 1.702
_LIMIT: Final = 7.0
_THETA: Final = 150_000.0
_SOFTMAX_OF_CHOSEN: Final = 3


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    for key, only in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if fields.number(key, only) != only:
            raise fields.error(key, fields.data[key], f"{only}, the only supported value")
    num_layers = fields.integer("num_hidden_layers", 36, maximum=common.MAX_LAYERS)
    hidden, num_heads = fields.integer("hidden_size", 2880), fields.integer("num_attention_heads", 64)
    eps = fields.number("rms_norm_eps", 1e-5, above=True)
    max_positions = fields.integer("max_position_embeddings", 131_072)
    bias = fields.boolean("attention_bias", True)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", 8), fields.integer("head_dim", 64), eps,
        bias=bias, o_bias=bias, sinks=True,
        sliding_window=fields.integer("sliding_window", 128, minimum=0) or None,
    )  # fmt: skip
    router, experts = _mixture(
        hidden, eps, fields.integer(("num_local_experts", "num_experts"), 128, maximum=common.MAX_EXPERTS),
        fields.integer("num_experts_per_tok", 4), fields.integer("intermediate_size", 2880),
    )  # fmt: skip
    windows = common.read_layer_types(fields, num_layers, _SLIDING, lambda layer: layer % 2 == 0)
    rope = common.read_rope(fields, default_theta=_THETA, max_position_embeddings=max_positions)
    if fields.section(("rope_parameters", "rope_scaling")) is None:
        rope = RopeConfig("yarn", rope.theta, 32.0, original_max_position_embeddings=4096, truncate=False)
    return common.read_outline(
        fields, generation, _layers(num_layers, attention, windows, router, experts), eps=eps, rope=rope,
        rope_dim=attention.head_dim, max_position_embeddings=max_positions,
    )  # fmt: skip


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "gpt-oss". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    if fields.integer("expert_gating_func", 0, minimum=0) not in (0, _SOFTMAX_OF_CHOSEN):
        raise fields.error(
            "expert_gating_func",
            fields.data["expert_gating_func"],
            f"{_SOFTMAX_OF_CHOSEN} (softmax of the chosen)",
        )
    attention = replace(metadata.attention(), sinks=True)
    router, experts = _mixture(
        metadata.hidden_size, metadata.eps, fields.integer("expert_count", maximum=common.MAX_EXPERTS),
        fields.integer("expert_used_count"), fields.integer("expert_feed_forward_length"),
    )  # fmt: skip
    windows = set(range(0, metadata.num_layers, 2))
    layers = _layers(metadata.num_layers, attention, windows, router, experts)
    rope = metadata.rope(_THETA, attention.head_dim)
    if rope.kind == "yarn":
        rope = replace(rope, truncate=False)
    return metadata.outline("GptOssForCausalLM", layers, rope=rope, rope_dim=attention.head_dim)


def _mixture(
    hidden: int, eps: float, num_experts: int, top_k: int, inner: int
) -> tuple[Router, BiasedExperts]:
    router = Router(
        0, hidden, num_experts, top_k, eps, False, score="softmax_of_chosen", gates=("router",), gate_bias=True,
        gguf_norm="post_attention_norm",
    )  # fmt: skip
    return router, BiasedExperts(0, hidden, num_experts, top_k, inner, activation="swiglu_oai")


def _layers(
    num_layers: int, attention: Gqa, windows: set[int], router: Router, experts: BiasedExperts
) -> tuple[tuple[Block, ...], ...]:
    """The layers; `windows`: those with a sliding window."""
    full = replace(attention, sliding_window=None)
    return common.repeat_layers(num_layers, lambda n: (attention if n in windows else full, router, experts))


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, experts = config.blocks_of(Gqa), config.routed
    first = attention[0]
    if first.bias != first.o_bias:
        raise ModelLoadError(
            f"{where}: biases of some projections of attention are missing, expected all or none; convert it again"
        )
    windows = [block.sliding_window for block in attention]
    return {
        "model_type": "gpt_oss",
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "attention_bias": first.bias,
        "sliding_window": next(filter(None, windows), None),
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "intermediate_size": experts.intermediate_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "swiglu_limit": _LIMIT,
    }
