"""Gemma 4 with experts (26B-A4B), its text: windows in turn with full attention, norms behind blocks too.

Reference: transformers `models/gemma4`, defaults those of `Gemma4TextConfig`. Layers with full attention have heads of
another size, turn a share of their pairs, and may have no v_proj; GGUF files omit missing parts. Features of the small
models (inputs of every layer, keys and values of earlier layers) are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import RopeConfig
from twofold.models import config as common
from twofold.models import layer_kinds as kinds
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.models.normed_mixture import read_normed_mixture
from twofold.weights.json_file import Fields

_ROPES: Final = {kinds.SLIDING: RopeConfig(), kinds.FULL: RopeConfig("proportional", 1e6, share=0.25)}
_USUAL: Final = {"tie_word_embeddings": True, "hidden_size_per_layer_input": 256, "enable_moe_block": False}
_SEEING: Final = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    if common.architecture_name(fields) == "Gemma4ForConditionalGeneration":
        config = parse_config(text_fields(fields, "Gemma4ForCausalLM"), generation)
        patterns = (f"model.{part}.*" for part in _SEEING)
        return without_images(config, (("model.language_model.", "model."),), *patterns)
    fields = Fields(fields.where, _USUAL | fields.data)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", None, "vision")
    fields.only("hidden_size_per_layer_input", 0, None)
    fields.only("num_kv_shared_layers", 0, None)
    fields.only("enable_moe_block", True)
    num_layers = fields.integer("num_hidden_layers", 30, maximum=common.MAX_LAYERS)
    windows = common.read_layer_types(fields, num_layers, kinds.SLIDING, lambda n: (n + 1) % 6 != 0)
    windows -= {num_layers - 1}
    bias = fields.boolean("attention_bias", False)
    attention = Gqa(
        0, fields.integer("hidden_size"), fields.integer("num_attention_heads", 8),
        fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256),
        fields.number("rms_norm_eps", 1e-6, above=True), bias=bias, o_bias=bias, qk_norm=True, v_norm=True,
        sliding_window=fields.integer("sliding_window", 512), multiplier=1.0,
    )  # fmt: skip
    head_dim, kv_heads = kinds.read_full_sizes(fields, {*range(num_layers)} - windows)
    full = replace(
        attention, head_dim=head_dim, num_kv_heads=kv_heads or attention.num_kv_heads, sliding_window=None, rotation=1,
        keys_are_values=fields.boolean("attention_k_eq_v", False),
    )  # fmt: skip
    blocks, max_positions = (
        read_normed_mixture(fields, attention),
        fields.integer("max_position_embeddings", 131_072),
    )
    layers = common.repeat_layers(num_layers, lambda n: (attention if n in windows else full, *blocks))
    rope, of_full = (kinds.read_layer_rope(fields, *kind, max_positions) for kind in _ROPES.items())
    config = common.read_outline(
        fields, generation, layers, eps=attention.eps, rope=rope, rope_dim=attention.head_dim,
        max_position_embeddings=max_positions,
    )  # fmt: skip
    return _with_ends(config, of_full, head_dim, fields)


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "gemma4". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    fields.only("embedding_length_per_layer_input", 0)
    fields.only("attention.shared_kv_layers", 0)
    slides = metadata.of_layers("attention.sliding_window_pattern")
    kv_heads = metadata.of_layers("attention.head_count_kv", minimum=1)
    attention = Gqa(
        0, metadata.hidden_size, fields.integer("attention.head_count"), 1, fields.integer("attention.key_length_swa"),
        metadata.eps, qk_norm=True, v_norm=True, multiplier=1.0,
        sliding_window=fields.integer("attention.sliding_window"),
    )  # fmt: skip
    head_dim, blocks = fields.integer("attention.key_length"), read_normed_mixture(fields, attention)
    for suffix, dim in (("_swa", attention.head_dim), ("", head_dim)):
        fields.only(f"attention.value_length{suffix}", dim)
        fields.only(f"rope.dimension_count{suffix}", dim)

    def layer(n: int) -> tuple[Block, ...]:
        own = replace(attention, num_kv_heads=kv_heads[n])
        full = replace(
            own, head_dim=head_dim, sliding_window=None, rotation=1,
            keys_are_values=f"blk.{n}.attn_v.weight" not in metadata.file.tensors,
        )  # fmt: skip
        return own if slides[n] else full, *blocks

    layers = common.repeat_layers(metadata.num_layers, layer)
    rope = RopeConfig(theta=fields.number("rope.freq_base_swa", 10_000.0, above=True))
    config = metadata.outline("Gemma4ForCausalLM", layers, rope=rope, rope_dim=attention.head_dim)
    return _with_ends(config, kinds.with_share(metadata.rope(1e6, head_dim), head_dim), head_dim, fields)


def _with_ends(config: ModelConfig, rope: RopeConfig, rope_dim: int, fields: Fields) -> ModelConfig:
    """The configuration with the rotation of full-attention layers, embeddings times sqrt(hidden_size), capped
    logits."""
    cap = fields.optional_number("final_logit_softcapping", above=True)
    return replace(
        config, further_rotations=((rope, rope_dim),), head=replace(config.head, softcap=cap),
        embedding=replace(config.embedding, scale=config.hidden_size**0.5),
    )  # fmt: skip


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    routed = config.routed
    return kinds.kind_fields(config, where) | {
        "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": True,
        "hidden_size_per_layer_input": 0, "attention_bias": config.blocks_of(Gqa)[0].bias,
        "intermediate_size": config.blocks_of(DenseFfn)[0].intermediate_size, "num_experts": routed.num_experts,
        "top_k_experts": routed.top_k, "moe_intermediate_size": routed.intermediate_size,
        "final_logit_softcapping": config.head.softcap,
    }  # fmt: skip
