"""LFM2 with experts (8B-A1B): short convolutions in most layers, attention in some, sigmoid scores with a bias.

Reference: transformers `models/lfm2_moe`. GGUF files call it "lfm2moe" and
mark attention layers by their number of key heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.short_convolution import ShortConvolution
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_CONV, _FULL = "conv", "full_attention"
_RENAMED: Final = (
    ("model.embedding_norm.", "model.norm."), ("*.operator_norm.", "*.input_layernorm."),
    ("*.ffn_norm.", "*.post_attention_layernorm."), ("*.self_attn.out_proj.", "*.self_attn.o_proj."),
    ("*.q_layernorm.", "*.q_norm."), ("*.k_layernorm.", "*.k_norm."), ("*.feed_forward.", "*.mlp."),
    ("*.w1.", "*.gate_proj."), ("*.w3.", "*.up_proj."), ("*.w2.", "*.down_proj."),
)  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("lfm2_moe"))
    tied = fields.boolean(("tie_embedding", "tie_word_embeddings"), True)
    changed = {"tie_word_embeddings": tied, "rms_norm_eps": fields.number("norm_eps", above=True)}
    fields = fields.with_data(fields.data | changed)
    attention = replace(config_json.read_attention(fields), qk_norm=True)
    hidden, eps = attention.hidden_size, attention.eps
    conv = ShortConvolution(
        0, hidden, fields.integer("conv_L_cache"), eps, bias=fields.boolean("conv_bias", False)
    )
    router, experts = config_json.read_mixture(fields, attention)
    router = replace(
        router,
        scale=fields.number("routed_scaling_factor", above=True),
        score="sigmoid",
        bias=fields.boolean("use_expert_bias", True),
        bias_name="expert_bias",
    )
    dense = DenseFfn(0, hidden, fields.integer("intermediate_size"), eps)
    convolved = config_json.read_layer_types(fields, _CONV)
    first = fields.integer("first_k_dense_replace", minimum=0)

    def layer(n: int) -> tuple[Block, ...]:
        mixer = conv if n in convolved else attention
        return (mixer, router, experts) if n >= first else (mixer, dense)

    config = config_json.read_model(fields, generation, attention, layer)
    return replace(config, renamed=_RENAMED)


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "lfm2moe" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, tensors, layers = metadata.fields, metadata.file.tensors, range(metadata.num_layers)
    metadata.expect_score("sigmoid")
    kv_heads = metadata.of_layers("attention.head_count_kv")
    if len({*kv_heads} - {0}) != 1:
        raise fields.error("attention.head_count_kv", kv_heads[:8], "0 or one number for each layer")
    num_heads = fields.integer("attention.head_count")
    first = fields.integer("leading_dense_block_count", 0, minimum=0)
    return {
        "model_type": "lfm2_moe",
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", above=True),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(kv_heads),
        "head_dim": fields.integer("attention.key_length", max(1, metadata.hidden_size // num_heads)),
        "layer_types": [_FULL if heads else _CONV for heads in kv_heads],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "conv_bias": any(f"blk.{n}.shortconv.in_proj.bias" in tensors for n in layers),
        "num_dense_layers": next((n for n in layers if metadata.has_gate(n)), metadata.num_layers),
        "intermediate_size": fields.integer("feed_forward_length"),
        **metadata.experts(),
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in tensors,
    }
