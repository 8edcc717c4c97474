"""LFM2 with experts (8B-A1B): short convolutions in most layers, attention in some, sigmoid scores with a bias.

Reference: transformers `models/lfm2_moe`. Defaults below are those of `Lfm2MoeConfig`. GGUF files call it "lfm2moe" and
mark attention layers by their number of key heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.short_convolution import ShortConvolution
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
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
    tied = fields.boolean(("tie_embedding", "tie_word_embeddings"), True)
    fields = Fields(fields.where, fields.data | {"tie_word_embeddings": tied})
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", 32, maximum=common.MAX_LAYERS)
    eps = fields.number("norm_eps", 1e-5, above=True)
    convolved = common.read_layer_types(fields, num_layers, _CONV)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", 8),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps, qk_norm=True,
    )  # fmt: skip
    taps, bias = fields.integer("conv_L_cache", 3), fields.boolean("conv_bias", False)
    conv = ShortConvolution(0, hidden, taps, eps, bias)
    mixture = _mixture(
        attention, fields.integer("num_experts", 32, maximum=common.MAX_EXPERTS),
        fields.integer("num_experts_per_tok", 4), fields.integer("moe_intermediate_size", 1792),
        fields.boolean("norm_topk_prob", True), fields.number("routed_scaling_factor", 1.0, above=True),
        fields.boolean("use_expert_bias", True),
    )  # fmt: skip
    dense = DenseFfn(0, hidden, fields.integer("intermediate_size", 7168), eps)
    first = fields.integer("num_dense_layers", 2, minimum=0)
    max_positions = fields.integer("max_position_embeddings", 128_000)
    config = common.read_outline(
        fields, generation, common.repeat_layers(num_layers, lambda n: (
            conv if n in convolved else attention, *(mixture if n >= first else (dense,)))), eps=eps,
        rope=common.read_rope(fields, default_theta=1e6, max_position_embeddings=max_positions),
        rope_dim=attention.head_dim, max_position_embeddings=max_positions,
    )  # fmt: skip
    return replace(config, renamed=_RENAMED)


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "lfm2moe". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    fields.only("expert_gating_func", 2, 0)  # sigmoid
    kv_heads = metadata.of_layers("attention.head_count_kv")
    if len({*kv_heads} - {0}) != 1:
        raise fields.error("attention.head_count_kv", kv_heads[:8], "0 or one number for each layer")
    num_heads = fields.integer("attention.head_count")
    attention = Gqa(
        0, metadata.hidden_size, num_heads, max(kv_heads),
        fields.integer("attention.key_length", max(1, metadata.hidden_size // num_heads)), metadata.eps, qk_norm=True,
    )  # fmt: skip
    bias = any(f"blk.{n}.shortconv.in_proj.bias" in metadata.file.tensors for n in range(metadata.num_layers))
    conv = ShortConvolution(0, metadata.hidden_size, fields.integer("shortconv.l_cache"), metadata.eps, bias)
    first = fields.integer("leading_dense_block_count", 0, minimum=0)
    mixture = _mixture(
        attention, fields.integer("expert_count", maximum=common.MAX_EXPERTS), fields.integer("expert_used_count"),
        fields.integer("expert_feed_forward_length"), True, fields.number("expert_weights_scale", 1.0) or 1.0,
        f"blk.{first}.exp_probs_b.bias" in metadata.file.tensors,
    )  # fmt: skip
    dense = DenseFfn(0, metadata.hidden_size, fields.integer("feed_forward_length"), metadata.eps)
    layers = common.repeat_layers(metadata.num_layers, lambda n: (
        attention if kv_heads[n] else conv, *(mixture if metadata.has_gate(n) else (dense,))))  # fmt: skip
    dim = attention.head_dim
    return metadata.outline("Lfm2MoeForCausalLM", layers, rope=metadata.rope(1e6, dim), rope_dim=dim)


def _mixture(
    attention: Gqa, experts: int, top_k: int, inner: int, renormalise: bool, scale: float, bias: bool
) -> tuple[Block, ...]:
    hidden = attention.hidden_size
    router = Router(
        0, hidden, experts, top_k, attention.eps, renormalise, scale, score="sigmoid", bias=bias,
        bias_name="expert_bias",
    )  # fmt: skip
    return router, RoutedExperts(0, hidden, experts, top_k, inner)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, conv, routed = config.blocks_of(Gqa)[0], config.blocks_of(ShortConvolution), config.routed
    router, dense = config.blocks_of(Router)[0], config.blocks_of(DenseFfn)
    if config.moe_layers != tuple(range(len(dense), config.num_layers)) or not conv:
        raise ModelLoadError(
            f"{where}: dense layers are not the first; give the Hugging Face checkpoint instead"
        )
    return {
        "model_type": "lfm2_moe", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim, "norm_eps": config.head.eps,
        "layer_types": [_FULL if isinstance(layer[0], Gqa) else _CONV for layer in config.layers],
        "conv_L_cache": conv[0].taps, "conv_bias": conv[0].bias, "num_dense_layers": len(dense),
        "intermediate_size": dense[0].intermediate_size if dense else routed.intermediate_size,
        "moe_intermediate_size": routed.intermediate_size, "num_experts": routed.num_experts,
        "num_experts_per_tok": routed.top_k, "norm_topk_prob": router.renormalise,
        "routed_scaling_factor": router.scale, "use_expert_bias": router.bias,
    }  # fmt: skip
