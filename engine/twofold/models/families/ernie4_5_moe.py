"""ERNIE-4.5 with experts: rotation of neighbouring pairs, softmax scores with a bias for choosing, shared experts.

Reference: transformers `models/ernie4_5_moe`. GGUF files call it
"ernie4_5-moe" and have the rows of q and k as checkpoints have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_PREDICTION: Final = {
    "model.mtp_linear_proj.0.": "eh_proj.", "model.mtp_emb_norm.0.": "enorm.", "model.mtp_hidden_norm.0.": "hnorm.",
    "model.mtp_block.0.": "",
}  # fmt: skip
"""Names of the prediction layer's parts in checkpoints. Its feed-forward part is dense."""


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("ernie4_5_moe"))
    config_json.read_activation(fields)
    fields.only("use_bias", False)
    fields.number("moe_norm_min", 1e-12, maximum=1e-6)  # far below any sum of probabilities it bounds
    attention = replace(config_json.read_attention(fields), neighbours=True)
    hidden = attention.hidden_size
    router, experts = config_json.read_mixture(fields, attention)
    router = replace(router, renormalise=True, bias=True, bias_name="moe_statics.e_score_correction_bias")
    num_shared = fields.optional_integer("num_shared_experts") or 0
    shared = (SharedExperts(0, hidden, num_shared * experts.intermediate_size),) if num_shared else ()
    dense = DenseFfn(0, hidden, fields.integer("intermediate_size"), attention.eps)
    first, last = (fields.integer(f"moe_layer_{end}_index", minimum=-1) for end in ("start", "end"))
    step, last = (
        fields.integer("moe_layer_interval"),
        config_json.num_layers_of(fields) - 1 if last == -1 else last,
    )

    def layer(n: int) -> tuple[Block, ...]:
        has_experts = first <= n <= last and (n + 1) % step == 0
        return (attention, router, *shared, experts) if has_experts else (attention, dense)

    config = config_json.read_model(fields, generation, attention, layer)
    config = replace(config, renamed=(("*.mlp.gate.moe_statics.", "*.mlp.moe_statics."),))
    # config.json does not always say whether the checkpoint has the layer.
    count = max(1, fields.optional_integer("num_nextn_predict_layers") or 0)
    return config.predicting(
        fields.where, count, (attention, dense), own_norm=False, renamed=_PREDICTION, pattern="model.mtp_*"
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "ernie4_5-moe" in config.json's format. Raises ModelLoadError naming file and key."""
    fields = metadata.fields
    with_experts = [n for n in range(metadata.num_layers) if metadata.has_gate(n)]
    first, last = (with_experts[0], with_experts[-1]) if with_experts else (0, 0)
    steps = range(1, metadata.num_layers + 1)
    fitting = (s for s in steps if with_experts == [n for n in range(first, last + 1) if (n + 1) % s == 0])
    step = next(fitting, None)
    if step is None:
        raise ModelLoadError(
            f"{fields.where}: layers {with_experts} have experts, expected one interval between them; give the "
            "Hugging Face checkpoint instead"
        )
    return {
        "model_type": "ernie4_5_moe",
        **metadata.attention(),
        "use_bias": False,
        **metadata.dense_size(),
        **metadata.experts("moe_num_experts", top_k="moe_k"),
        "moe_num_shared_experts": fields.integer("expert_shared_count", 0, minimum=0),
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": step,
    }
