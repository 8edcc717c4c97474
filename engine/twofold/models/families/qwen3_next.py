"""Qwen3-Next: three gated delta nets to one layer of gated attention, of which a share of each head is rotated.

Reference: transformers `models/qwen3_next`. Defaults below are those of `Qwen3NextConfig`. GGUF files call it
"qwen3next". If a value has several keys, the first is config.json's, the others are GGUF's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gated_delta import GatedDelta
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_LINEAR, _FULL = "linear_attention", "full_attention"
_GGUF_NORM: Final = "post_attention_norm"
MTP: Final = ("multi-token prediction", "mtp.*")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    experts = {n for n in range(num_layers) if n not in dense and (n + 1) % step == 0}
    return read(fields, generation, experts, fields.boolean("norm_topk_prob", True))


def read(
    fields: Fields, generation: GenerationDefaults, with_experts: set[int], renormalise: bool
) -> ModelConfig:
    """The configuration from the fields of the layers; `renormalise`: whether chosen experts' weights are divided by
    their sum."""
    common.read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", 16)
    eps = fields.number("rms_norm_eps", 1e-6, above=True)
    max_positions = fields.integer("max_position_embeddings", 32_768)
    bias = fields.boolean("attention_bias", False)
    # Twofold's own keys, written for GGUF files, which store values that transformers derives from a checkpoint's.
    converted = fields.boolean("values_of_gguf", False)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", 2), fields.integer("head_dim", 256), eps,
        bias=bias, o_bias=bias, qk_norm=True, gated=True, zero_centred=not converted,
    )  # fmt: skip
    delta = GatedDelta(
        0, hidden, fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4, maximum=64), eps, zero_centred=not converted,
        log_decay=not converted, tiled=fields.boolean("tiled_value_heads", False),
    )  # fmt: skip
    linear = common.read_layer_types(
        fields, num_layers, _LINEAR, lambda n: (n + 1) % fields.integer("full_attention_interval", 4) != 0
    )
    wide = 1 if len(with_experts) == num_layers else fields.integer("intermediate_size", 5632)
    layers = compose(
        fields, attention, delta, [layer not in linear for layer in range(num_layers)], with_experts.__contains__, wide,
        renormalise=renormalise, shared=fields.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    config = common.read_outline(
        fields, generation, layers, eps=eps, max_position_embeddings=max_positions,
        rope=common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions, partial=True),
        rope_dim=common.read_rotary_dim(fields, attention.head_dim, 0.25),
    )  # fmt: skip
    head = replace(config.head, zero_centred=not converted)
    return replace(config, head=head, left_out=(*config.left_out, MTP))


def compose(
    fields: Fields, attention: Gqa, delta: GatedDelta, full: Sequence[bool], has_experts: Callable[[int], bool],
    dense_size: int, *, renormalise: bool, shared: int,
) -> tuple[tuple[Block, ...], ...]:  # fmt: skip
    """The layers; those in `full` have attention."""
    hidden, eps, centred = attention.hidden_size, attention.eps, attention.zero_centred
    experts = fields.integer(("num_experts", "num_local_experts", "expert_count"), maximum=common.MAX_EXPERTS)
    top_k = fields.integer(("num_experts_per_tok", "expert_used_count"))
    inner = fields.integer(("moe_intermediate_size", "expert_feed_forward_length"))
    mixture = (
        Router(0, hidden, experts, top_k, eps, renormalise, gguf_norm=_GGUF_NORM, zero_centred=centred),
        SharedExperts(0, hidden, shared, "mlp.shared_expert", gated=True),
        RoutedExperts(0, hidden, experts, top_k, inner),
    )
    dense = (DenseFfn(0, hidden, dense_size, eps, _GGUF_NORM, centred),)
    return common.repeat_layers(
        len(full), lambda n: (attention if full[n] else delta, *(mixture if has_experts(n) else dense))
    )


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "qwen3next". Raises ModelLoadError naming the file and the key."""
    return read_gguf(metadata, "Qwen3NextForCausalLM", tiled=False)


def read_gguf(metadata: GgufMetadata, class_name: str, *, tiled: bool) -> ModelConfig:
    """A GGUF file's configuration with this class name; `tiled`: see `GatedDelta.tiled`."""
    fields, tensors = metadata.fields, metadata.file.tensors
    further = fields.integer("nextn_predict_layers", 0, minimum=0)
    num_layers = metadata.num_layers - further
    full = [f"blk.{n}.ssm_a" not in tensors for n in range(num_layers)]
    bias = any(name.endswith(".attn_q.bias") for name in tensors)
    attention = metadata.attention(qk_norm=True, partly_rotated=True)
    attention = replace(attention, bias=bias, o_bias=bias, gated=True)
    v_heads = fields.integer("ssm.time_step_rank", 32)
    delta = GatedDelta(
        0, metadata.hidden_size, fields.integer("ssm.group_count", 16), v_heads, fields.integer("ssm.state_size", 128),
        max(1, fields.integer("ssm.inner_size", 4096) // v_heads), fields.integer("ssm.conv_kernel", 4, maximum=64),
        metadata.eps, log_decay=False, tiled=tiled,
    )  # fmt: skip

    def has_gate(layer: int) -> bool:
        return f"blk.{layer}.ffn_gate_inp.weight" in tensors

    wide = 1 if all(map(has_gate, range(num_layers))) else fields.integer("feed_forward_length")
    layers = compose(
        fields, attention, delta, full, has_gate, wide, renormalise=fields.boolean("expert_weights_norm", True),
        shared=fields.integer(("expert_shared_feed_forward_length", "feed_forward_length")),
    )  # fmt: skip
    rope_dim = fields.integer("rope.dimension_count", attention.head_dim, maximum=attention.head_dim)
    rope = metadata.rope(10_000.0, rope_dim)
    config = metadata.outline(class_name, layers, rope=rope, rope_dim=rope_dim)
    return config.without_predictions(fields.where, further)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format, and the differences of a GGUF file's values."""
    attention, delta, dense = (
        config.blocks_of(Gqa)[0],
        config.blocks_of(GatedDelta),
        config.blocks_of(DenseFfn),
    )
    inner = config.routed.intermediate_size
    of_delta = {} if not delta else {
        "linear_num_key_heads": delta[0].num_k_heads, "linear_num_value_heads": delta[0].num_v_heads,
        "linear_key_head_dim": delta[0].key_dim, "linear_value_head_dim": delta[0].value_dim,
        "linear_conv_kernel_dim": delta[0].taps, "tiled_value_heads": delta[0].tiled,
    }  # fmt: skip
    return of_delta | {
        "model_type": "qwen3_next", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
        "partial_rotary_factor": common.rotary_share(config.rope_dim, attention.head_dim),
        "attention_bias": attention.bias,
        "layer_types": [_FULL if isinstance(layer[0], Gqa) else _LINEAR for layer in config.layers],
        "mlp_only_layers": [block.layer for block in dense],
        "intermediate_size": dense[0].intermediate_size if dense else inner, "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": config.blocks_of(SharedExperts)[0].intermediate_size,
        "num_experts": config.num_experts, "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.blocks_of(Router)[0].renormalise, "values_of_gguf": not attention.zero_centred,
    }  # fmt: skip
