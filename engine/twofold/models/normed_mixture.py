"""Gemma's layer layout: norm after attention, dense part and experts in parallel with norms, norm of their sum."""

from __future__ import annotations

from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.post_norm import PostNorm
from twofold.blocks.router import Router
from twofold.models.config import MAX_EXPERTS
from twofold.weights.json_file import Fields


def read_normed_mixture(fields: Fields, attention: Gqa) -> tuple[Block, ...]:
    """Blocks after `attention` in a layer; sizes under config.json's or GGUF's keys. Raises ModelLoadError."""
    hidden, eps = attention.hidden_size, attention.eps
    wide = fields.integer(("intermediate_size", "feed_forward_length"))
    experts = fields.integer(("num_experts", "expert_count"), maximum=MAX_EXPERTS)
    top_k = fields.integer(("top_k_experts", "expert_used_count"))
    inner = fields.integer(("moe_intermediate_size", "expert_feed_forward_length"))
    return (
        PostNorm(0, hidden, eps, "post_attention_layernorm", "post_attention_norm"),
        DenseFfn(0, hidden, wide, eps, norm="pre_feedforward_layernorm", activation="gelu_tanh"),
        PostNorm(0, hidden, eps, "post_feedforward_layernorm_1", "post_ffw_norm_1"),
        Router(0, hidden, experts, top_k, eps, True, modules=("router",), gates=("proj",), gate_scaled=True,
               norm="pre_feedforward_layernorm_2", gguf_norm="pre_ffw_norm_2", expert_scaled=True),
        RoutedExperts(0, hidden, experts, top_k, inner, ("",), activation="gelu_tanh"),
        PostNorm(0, hidden, eps, "post_feedforward_layernorm_2", "post_ffw_norm_2"),
        PostNorm(0, hidden, eps, "post_feedforward_layernorm", "post_ffw_norm", over=5, scalar=True),
    )  # fmt: skip
