"""Qwen3-Next: three gated delta nets to one layer of gated attention, of which a share of each head is rotated.

Reference: transformers `models/qwen3_next`. GGUF files call it
"qwen3next".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.gated_delta import GatedDelta
from twofold.blocks.gqa import Gqa
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_LINEAR, _FULL = "linear_attention", "full_attention"
_GGUF_NORM: Final = "post_attention_norm"
PREDICTION: Final = {
    "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.", "mtp.layers.0.": "",
}  # fmt: skip
"""Names of the prediction layer's parts in checkpoints."""


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("qwen3_next"))
    config_json.read_activation(fields)
    # Twofold's own keys, written for GGUF files, which store values that transformers derives from a checkpoint's.
    zero_centred = not fields.boolean("values_of_gguf", False)
    attention = replace(
        config_json.read_attention(fields), qk_norm=True, gated=True, zero_centred=zero_centred
    )
    delta = _read_delta(fields, attention)
    linear_layers = config_json.read_layer_types(
        fields, _LINEAR, lambda n: (n + 1) % fields.integer("full_attention_interval") != 0
    )
    router, experts = config_json.read_mixture(fields, attention)
    width = fields.integer("shared_expert_intermediate_size")
    mixture = (
        replace(router, gguf_norm=_GGUF_NORM, zero_centred=zero_centred),
        SharedExperts(0, attention.hidden_size, width, "mlp.shared_expert", gated=True),
        experts,
    )
    dense_layers, dense = config_json.read_dense_layers(fields, attention)
    dense = replace(dense, gguf_norm=_GGUF_NORM, zero_centred=zero_centred)

    def layer(n: int) -> tuple[Block, ...]:
        mixer = delta if n in linear_layers else attention
        return (mixer, dense) if n in dense_layers else (mixer, *mixture)

    config = config_json.read_model(fields, generation, attention, layer, rotated_share=0.25)
    config = replace(config, head=replace(config.head, zero_centred=zero_centred))
    # config.json does not say whether the checkpoint has the layer.
    count = max(1, fields.optional_integer("num_nextn_predict_layers") or 0)
    return config.predicting(fields.where, count, (attention, *mixture), renamed=PREDICTION, pattern="mtp.*")


def _read_delta(fields: Fields, attention: Gqa) -> GatedDelta:
    return GatedDelta(
        layer=0,
        hidden_size=attention.hidden_size,
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", maximum=64),
        eps=attention.eps,
        zero_centred=attention.zero_centred,
        log_decay=attention.zero_centred,
        tiled=fields.boolean("tiled_value_heads", False),
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "qwen3next" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, tensors = metadata.fields, metadata.file.tensors
    v_heads = fields.integer("ssm.time_step_rank", 32)
    return {
        "model_type": "qwen3_next",
        **metadata.attention(partly_rotated=True),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "layer_types": [
            _LINEAR if f"blk.{n}.ssm_a" in tensors else _FULL for n in range(metadata.num_layers)
        ],
        "linear_num_key_heads": fields.integer("ssm.group_count", 16),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size", 128),
        "linear_value_head_dim": max(1, fields.integer("ssm.inner_size", 4096) // v_heads),
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel", 4, maximum=64),
        **metadata.dense_layers(),
        **metadata.experts(),
        "shared_expert_intermediate_size": fields.integer(
            ("expert_shared_feed_forward_length", "feed_forward_length")
        ),
        "norm_topk_prob": fields.boolean("expert_weights_norm", True),
        "values_of_gguf": True,
    }
