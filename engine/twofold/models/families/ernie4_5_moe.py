"""ERNIE-4.5 with experts: rotation of neighbouring pairs, softmax scores with a bias for choosing, shared experts.

Reference: transformers `models/ernie4_5_moe`. Defaults below are those of `Ernie4_5_MoeConfig`. GGUF files call it
"ernie4_5-moe" and have the rows of q and k as checkpoints have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = Fields(fields.where, {"tie_word_embeddings": True} | fields.data)
    common.read_activation(fields)
    fields.only("use_bias", False)
    fields.number("moe_norm_min", 1e-12, maximum=1e-6)  # far below any sum of probabilities it bounds
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    eps = fields.number("rms_norm_eps", 1e-5, above=True)
    max_positions = fields.integer("max_position_embeddings", 131_072)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", num_heads),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps, neighbours=True,
    )  # fmt: skip
    mixture = _mixture(
        attention, fields.integer(("moe_num_experts", "num_experts"), 64, maximum=common.MAX_EXPERTS),
        fields.integer(("moe_k", "num_experts_per_tok"), 6), fields.integer("moe_intermediate_size", 1536),
        fields.integer("moe_num_shared_experts", 2, minimum=0),
    )  # fmt: skip
    dense = (DenseFfn(0, hidden, fields.integer("intermediate_size", 12_288), eps),)
    num_layers = fields.integer("num_hidden_layers", 28, maximum=common.MAX_LAYERS)
    first, last = (fields.integer(f"moe_layer_{end}_index", default, minimum=-1) for end, default in
                   (("start", 1), ("end", -1)))  # fmt: skip
    step, last = fields.integer("moe_layer_interval", 1), num_layers - 1 if last == -1 else last

    def layer(n: int) -> tuple[Block, ...]:
        return (attention, *(mixture if first <= n <= last and (n + 1) % step == 0 else dense))

    config = common.read_outline(
        fields, generation, common.repeat_layers(num_layers, layer), eps=eps,
        rope=common.read_rope(fields, default_theta=500_000.0, max_position_embeddings=max_positions),
        rope_dim=attention.head_dim, max_position_embeddings=max_positions,
    )  # fmt: skip
    return replace(config, left_out=(("multi-token prediction", "model.mtp_*"),))


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "ernie4_5-moe". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    attention = replace(metadata.attention(), neighbours=True)
    mixture = _mixture(
        attention, fields.integer("expert_count", maximum=common.MAX_EXPERTS), fields.integer("expert_used_count"),
        fields.integer("expert_feed_forward_length"), fields.integer("expert_shared_count", 0, minimum=0),
    )  # fmt: skip
    layers = metadata.layers(attention, *mixture)
    rope = metadata.rope(500_000.0, attention.head_dim)
    return metadata.outline("Ernie4_5_MoeForCausalLM", layers, rope=rope, rope_dim=attention.head_dim)


def _mixture(attention: Gqa, experts: int, top_k: int, inner: int, shared: int) -> tuple[Block, ...]:
    hidden = attention.hidden_size
    router = Router(
        0, hidden, experts, top_k, attention.eps, renormalise=True, bias=True,
        bias_name="moe_statics.e_score_correction_bias",
    )  # fmt: skip
    beside = (SharedExperts(0, hidden, shared * inner),) if shared else ()
    return router, *beside, RoutedExperts(0, hidden, experts, top_k, inner)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, routed = config.blocks_of(Gqa)[0], config.routed
    dense, shared = config.blocks_of(DenseFfn), config.blocks_of(SharedExperts)
    first, last = config.moe_layers[0], config.moe_layers[-1]
    steps = (s for s in range(1, config.num_layers + 1)
             if config.moe_layers == tuple(n for n in range(first, last + 1) if (n + 1) % s == 0))  # fmt: skip
    step = next(steps, None)
    if step is None or attention.sliding_window is not None or attention.bias:
        raise ModelLoadError(
            f"{where}: {config.architecture} has its mixtures at one interval, no sliding window and no biases; give "
            "the Hugging Face checkpoint instead"
        )
    inner = routed.intermediate_size
    return {
        "model_type": "ernie4_5_moe", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim, "use_bias": False,
        "intermediate_size": dense[0].intermediate_size if dense else inner, "moe_intermediate_size": inner,
        "moe_num_experts": routed.num_experts, "moe_k": routed.top_k,
        "moe_num_shared_experts": shared[0].intermediate_size // inner if shared else 0,
        "moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step,
    }  # fmt: skip
