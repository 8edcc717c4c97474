"""Families in which most layers have a recurrent state or a convolution instead of attention, by name.

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.gated_delta import GatedDelta
from twofold.blocks.short_convolution import ShortConvolution
from twofold.models.decoder import FULL, Axes, Decoder, Mixer, MtpLayer, TextPart
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import FromConfig
from twofold.weights.json_file import Fields

_CONV, _LINEAR = "conv", "linear_attention"
_LFM2_NAMES: Final = (
    ("model.embedding_norm.", "model.norm."), ("*.operator_norm.", "*.input_layernorm."),
    ("*.ffn_norm.", "*.post_attention_layernorm."), ("*.self_attn.out_proj.", "*.self_attn.o_proj."),
    ("*.q_layernorm.", "*.q_norm."), ("*.k_layernorm.", "*.k_norm."), ("*.feed_forward.", "*.mlp."),
    ("*.w1.", "*.gate_proj."), ("*.w3.", "*.up_proj."), ("*.w2.", "*.down_proj."),
)  # fmt: skip
_QWEN_MTP: Final = {
    "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.", "mtp.layers.0.": "",
}  # fmt: skip


def read_delta(fields: Fields) -> GatedDelta:
    # GGUF files store values that transformers derives from a checkpoint's.
    zero_centred = not fields.boolean("values_of_gguf", False)
    return GatedDelta(
        layer=0,
        hidden_size=fields.integer("hidden_size"),
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", maximum=64),
        eps=fields.number("rms_norm_eps", above=True),
        zero_centred=zero_centred,
        log_decay=zero_centred,
        tiled=fields.boolean("tiled_value_heads", False),
    )


def _read_convolution(fields: Fields) -> ShortConvolution:
    return ShortConvolution(
        0,
        fields.integer("hidden_size"),
        fields.integer("conv_L_cache"),
        fields.number("rms_norm_eps", above=True),
        bias=fields.boolean("conv_bias", False),
    )


def _lfm2_names(fields: Fields) -> dict[str, Any]:
    """LFM2's own names of the tie and of epsilon."""
    return {
        "tie_word_embeddings": fields.boolean(("tie_embedding", "tie_word_embeddings"), True),
        "rms_norm_eps": fields.number("norm_eps", above=True),
    }


def _lfm2_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """LFM2's layers with attention are those with key heads."""
    fields, tensors, layers = metadata.fields, metadata.file.tensors, range(metadata.num_layers)
    metadata.expect_score("sigmoid")
    kv_heads = metadata.of_layers("attention.head_count_kv")
    if len({*kv_heads} - {0}) != 1:
        raise fields.error("attention.head_count_kv", kv_heads[:8], "0 or one number for each layer")
    num_heads = fields.integer("attention.head_count")
    first = fields.integer("leading_dense_block_count", 0, minimum=0)
    return {
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", above=True),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(kv_heads),
        "head_dim": fields.integer("attention.key_length", max(1, metadata.hidden_size // num_heads)),
        "layer_types": [FULL if heads else _CONV for heads in kv_heads],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "conv_bias": any(f"blk.{n}.shortconv.in_proj.bias" in tensors for n in layers),
        "num_dense_layers": next((n for n in layers if metadata.has_gate(n)), metadata.num_layers),
        "intermediate_size": fields.integer("feed_forward_length"),
        **metadata.experts(),
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in tensors,
    }


def qwen_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Qwen3-Next's layers with a gated delta net are those with its decay."""
    fields, tensors = metadata.fields, metadata.file.tensors
    v_heads = fields.integer("ssm.time_step_rank", 32)
    return {
        **metadata.attention(partly_rotated=True),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "layer_types": [_LINEAR if f"blk.{n}.ssm_a" in tensors else FULL for n in range(metadata.num_layers)],
        "linear_num_key_heads": fields.integer("ssm.group_count", 16),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size", 128),
        "linear_value_head_dim": max(1, fields.integer("ssm.inner_size", 4096) // v_heads),
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel", 4, maximum=64),
        **(
            _qwen_mixture(metadata)
            if metadata.has_gate(metadata.num_layers - 1)
            else {"intermediate_size": fields.integer("feed_forward_length")}
        ),
    }


def _qwen_mixture(metadata: GgufMetadata) -> dict[str, Any]:
    fields = metadata.fields
    return {
        **metadata.dense_layers(),
        **metadata.experts(),
        "shared_expert_intermediate_size": fields.integer(
            ("expert_shared_feed_forward_length", "feed_forward_length")
        ),
        "norm_topk_prob": fields.boolean("expert_weights_norm", True),
    }


DELTA: Final = Mixer(
    _LINEAR, read_delta, lambda fields, n: (n + 1) % fields.integer("full_attention_interval") != 0
)
_QWEN3_NEXT: Final = Decoder(
    "Qwen3-Next: three gated delta nets to one layer of gated attention, of which a share of each head is rotated.",
    "qwen3_next",
    mixer=DELTA,
    attention={"norms": HeadNorms(), "gate": Gate(), "zero_centred": True},
    rotated_share=0.25,
    dense={"gguf_norm": "post_attention_norm", "zero_centred": True},
    router={"gguf_norm": "post_attention_norm", "zero_centred": True},
    shared={"module": "mlp.shared_expert", "gated": True},
    mtp=MtpLayer(unannounced=True, renamed=_QWEN_MTP, pattern="mtp.*"),
    gguf_whole=qwen_gguf,
)

# For text, the three positions of its rotation are equal, so it is plain RoPE.
QWEN3_5_MOE: Final = replace(
    _QWEN3_NEXT,
    summary="Qwen3.5-MoE and Qwen3.6-MoE: Qwen3-Next with separate projections.",
    model_type="qwen3_5_moe_text",
    only={"attn_output_gate": (True,)},
    text=TextPart(axes=Axes((11, 11, 10), arrangement="interleaved")),
    gguf_whole=lambda metadata: qwen_gguf(metadata) | {"tiled_value_heads": True},
)

RECURRENT: Final = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5": replace(
        QWEN3_5_MOE,
        summary="Qwen3.5 and Qwen3.6 (0.8B to 27B): Qwen3.5-MoE's layers without experts.",
        model_type="qwen3_5_text",
        router=None,
        mtp=MtpLayer(dense=True, unannounced=True, renamed=_QWEN_MTP, pattern="mtp.*"),
    ),
    "lfm2_moe": Decoder(
        "LFM2 with experts (8B-A1B): short convolutions in most layers, attention in some, sigmoid scores with a bias.",
        "lfm2_moe",
        restated=_lfm2_names,
        mixer=Mixer(_CONV, _read_convolution),
        attention={"norms": HeadNorms()},
        router={"score": "sigmoid", "bias": FromConfig("use_expert_bias", True), "bias_name": "expert_bias"},
        renamed=_LFM2_NAMES,
        gguf_whole=_lfm2_gguf,
    ),
}  # fmt: skip
