"""Llama 4 (Scout, Maverick), its text: chunked attention, every fourth layer without rotation, one expert per token.

Reference: transformers `models/llama4`, defaults those of `Llama4TextConfig`. GGUF files omit llama.cpp's built-in
settings. The router's weight multiplies an expert's input. Norms of queries and keys have no weights and follow the
rotation, so they cancel its scaling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_MODULE: Final = "feed_forward"
_CHUNK, _SLOPE = 8192, 0.1


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    if common.architecture_name(fields) == "Llama4ForConditionalGeneration":
        config = parse_config(text_fields(fields, "Llama4ForCausalLM"), generation)
        return without_images(config, (("language_model.", ""),), "vision_model.*", "multi_modal_projector.*")
    common.read_activation(fields)
    fields.only("attn_temperature_tuning", True, False, 4)  # 4: as first published
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    bias, normed = fields.boolean("attention_bias", False), fields.boolean("use_qk_norm", True)
    tuning = fields.number("floor_scale", _CHUNK, above=True), fields.number("attn_scale", _SLOPE)
    attention = Gqa(
        0, fields.integer("hidden_size"), fields.integer("num_attention_heads"),
        fields.integer("num_key_value_heads", 8), fields.integer("head_dim", 128),
        fields.number("rms_norm_eps", 1e-5, above=True), bias=bias, o_bias=bias, neighbours=True, unit_norms=normed,
        attention_chunk=fields.integer("attention_chunk_size", _CHUNK),
        temperature=tuning if fields.data.get("attn_temperature_tuning", True) else None,
    )  # fmt: skip
    interval = fields.integer("no_rope_layer_interval", 4)
    turns = fields.integers("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(num_layers)]
    if len(turns) < num_layers:
        raise fields.error("no_rope_layers", list(turns), f"0 or 1 for each of {num_layers} layers")
    chunked = common.read_layer_types(fields, num_layers, "chunked_attention", lambda n: turns[n] != 0)
    step = fields.integer("interleave_moe_layer_step", 1)
    is_moe = fields.integers("moe_layers") or range(step - 1, num_layers, step)
    sizes = (fields.integer("num_local_experts", 16, maximum=common.MAX_EXPERTS),
             fields.integer("num_experts_per_tok", 1), fields.integer("intermediate_size", 8192))  # fmt: skip
    wide = fields.integer("intermediate_size_mlp", 16_384)

    def layer(n: int) -> tuple[Block, ...]:
        return _layer(attention, turns[n] != 0, n in chunked, sizes, None if n in is_moe else wide)

    max_positions = fields.integer("max_position_embeddings", 131_072)
    rope = common.read_rope(fields, default_theta=500_000.0, max_position_embeddings=max_positions)
    return common.read_outline(
        fields, generation, common.repeat_layers(num_layers, layer), eps=attention.eps, rope_dim=attention.head_dim,
        rope=replace(rope, attention_factor=1.0) if normed and rope.kind == "yarn" else rope,
        max_position_embeddings=max_positions,
    )  # fmt: skip


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "llama4". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    fields.only("expert_gating_func", 2, 0)  # sigmoid
    fields.only("attention.sliding_window", _CHUNK)
    fields.only("rope.scaling.type", "none")
    experts = fields.integer("expert_count", maximum=common.MAX_EXPERTS)
    attention = replace(
        metadata.attention(), neighbours=True, sliding_window=None, attention_chunk=_CHUNK,
        temperature=(_CHUNK, _SLOPE), unit_norms=experts != 128,  # Maverick, as in llama.cpp
    )  # fmt: skip
    interval = fields.integer("attention.sliding_window_pattern", 4)
    sizes = experts, fields.integer("expert_used_count"), fields.integer("expert_feed_forward_length")
    wide = fields.integer("feed_forward_length")

    def layer(n: int) -> tuple[Block, ...]:
        turns = (n + 1) % interval != 0
        return _layer(attention, turns, turns, sizes, None if metadata.has_gate(n) else wide)

    layers, rope = (
        common.repeat_layers(metadata.num_layers, layer),
        metadata.rope(500_000.0, attention.head_dim),
    )
    return metadata.outline("Llama4ForCausalLM", layers, rope=rope, rope_dim=attention.head_dim)


def _layer(
    attention: Gqa, turns: bool, chunked: bool, sizes: tuple[int, int, int], wide: int | None
) -> tuple[Block, ...]:
    """A layer's blocks: norms only with rotation, temperature only without; `sizes` of its experts, `wide` if it has
    none."""
    hidden, eps, (experts, top_k, inner) = attention.hidden_size, attention.eps, sizes
    attention = replace(
        attention, rotated=turns, unit_norms=attention.unit_norms and turns,
        attention_chunk=attention.attention_chunk if chunked else None,
        temperature=None if turns else attention.temperature,
    )  # fmt: skip
    if wide is not None:
        return attention, DenseFfn(0, hidden, wide, eps, module=_MODULE)
    return (
        attention,
        Router(0, hidden, experts, top_k, eps, False, score="sigmoid", modules=(_MODULE,), gates=("router",)),
        SharedExperts(0, hidden, inner, f"{_MODULE}.shared_expert"),
        RoutedExperts(0, hidden, experts, top_k, inner, (_MODULE,), transposed=True, weighs_rows=True),
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format; settings that GGUF files omit are config.json's defaults, too."""
    attention, routed, dense = config.blocks_of(Gqa), config.routed, config.blocks_of(DenseFfn)
    return {
        "model_type": "llama4_text", "num_attention_heads": attention[0].num_heads,
        "num_key_value_heads": attention[0].num_kv_heads, "head_dim": attention[0].head_dim,
        "attention_bias": attention[0].bias, "use_qk_norm": any(block.unit_norms for block in attention),
        "no_rope_layers": [int(block.rotated) for block in attention], "moe_layers": list(config.moe_layers),
        "intermediate_size": routed.intermediate_size,
        "intermediate_size_mlp": dense[0].intermediate_size if dense else routed.intermediate_size,
        "num_local_experts": routed.num_experts, "num_experts_per_tok": routed.top_k,
    }  # fmt: skip
