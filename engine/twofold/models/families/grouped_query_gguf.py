"""Settings of GGUF files beyond those that all families have, of families with grouped-query attention and experts."""

from __future__ import annotations

from typing import Any

from twofold.api.errors import ModelLoadError
from twofold.models.decoder import FULL, SLIDING
from twofold.models.gguf_config import GgufMetadata


def renormalised(metadata: GgufMetadata) -> dict[str, Any]:
    """Routing weights are normalised unless the file says otherwise; most files do not say it."""
    return {"norm_topk_prob": metadata.fields.boolean("expert_weights_norm", True)}


def qwen3(metadata: GgufMetadata) -> dict[str, Any]:
    """Qwen3-MoE's windows, in all layers if there are any."""
    return renormalised(metadata) | {"use_sliding_window": _has_window(metadata)}


def qwen2(metadata: GgufMetadata) -> dict[str, Any]:
    """Qwen2-MoE's biases, and its windows, in all layers if there are any."""
    kind = SLIDING if (slides := _has_window(metadata)) else FULL
    return {
        "qkv_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "use_sliding_window": slides,
        "layer_types": [kind] * metadata.num_layers,
    }


def mixtral(metadata: GgufMetadata) -> dict[str, Any]:
    """A file of architecture "llama" is a Mixtral; without experts a Llama, whatever the published model is called."""
    settings = {"rope_parameters": metadata.rope_parameters(10_000.0), **renormalised(metadata)}
    if metadata.fields.optional_integer("expert_count"):
        return settings
    return settings | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def olmoe(metadata: GgufMetadata) -> dict[str, Any]:
    """OLMoE's only supported clamp: none."""
    metadata.fields.only("attention.clamp_kqv", 0.0)
    return {}


def glm4(metadata: GgufMetadata) -> dict[str, Any]:
    """GLM-4.5's norms of queries and keys, which only some models have. Where positions have axes, it is GLM-4.5V."""
    settings = renormalised(metadata) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors}
    if not metadata.has_axes:
        return settings
    return settings | {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe_text"}


def mimo(metadata: GgufMetadata) -> dict[str, Any]:
    """MiMo's heads and scale of values. Raises ModelLoadError for other numbers of heads than the family's."""
    fields = metadata.fields
    slides = metadata.slides(0)
    heads = metadata.of_layers("attention.head_count_kv", minimum=1)[: metadata.num_layers]
    single = {heads[n] // (1 + slide) for n, slide in enumerate(slides)}
    if len(single) != 1 or any(heads[n] % 2 for n, slide in enumerate(slides) if slide):
        raise fields.error("attention.head_count_kv", heads[:8], "twice as many in layers with a window")
    return {
        "num_key_value_heads": single.pop(),
        "v_head_dim": fields.integer("attention.value_length"),
        "attention_value_scale": fields.number("attention.value_scale", 1.0, above=True),
        **renormalised(metadata),
    }


def laguna(metadata: GgufMetadata) -> dict[str, Any]:
    """Laguna's query heads by layer, and whether its gate is by head or by element."""
    heads = metadata.of_layers("attention.head_count", minimum=1)[: metadata.num_layers]
    gate = metadata.file.tensors.get("blk.0.attn_gate.weight")
    by_head = gate is None or gate.shape[0] == heads[0]
    return {"num_attention_heads_per_layer": heads, "gating": "per-head" if by_head else "per-element"}


def granite(metadata: GgufMetadata) -> dict[str, Any]:
    """Granite's multipliers; with shared experts it has another class."""
    fields = metadata.fields
    fields.only("rope.scaling.finetuned", True)
    shared = "Shared" if fields.data.get("expert_shared_feed_forward_length") else ""
    head_dim = metadata.attention(windows=True)["head_dim"]
    return {
        "architectures": [f"GraniteMoe{shared}ForCausalLM"],
        "model_type": f"granitemoe{shared.lower()}",
        "attention_multiplier": fields.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": fields.number("embedding_scale", 1.0, above=True),
        "residual_multiplier": fields.number("residual_scale", 1.0, minimum=1e-6),
        "logits_scaling": fields.number("logit_scale", 1.0, above=True),
    }


def granite_swa(metadata: GgufMetadata) -> dict[str, Any]:
    """Granite's layers with and without rotation. Raises ModelLoadError for a file without experts."""
    if not metadata.fields.data.get("expert_count"):
        raise ModelLoadError(
            f"{metadata.file.path}: has no experts, expected granite_swa with experts (GraniteMoeSWAForCausalLM), the "
            "only ones whose layers are described here; see `twofold models`"
        )
    key = f"{metadata.file.fields['general.architecture']}.attention.rope_pattern"
    turned = metadata.of_layers("attention.rope_pattern") if key in metadata.file.fields else ()
    theta = metadata.rope_parameters()["rope_theta"] or 10_000.0
    return granite(metadata) | {
        "architectures": ["GraniteMoeSWAForCausalLM"],
        "model_type": "granitemoe_swa",
        "layer_rope_theta": [theta if turn else 0 for turn in turned[: metadata.num_layers]] or None,
    }


def gpt_oss(metadata: GgufMetadata) -> dict[str, Any]:
    """YaRN's range of dimensions is not rounded to whole ones; files have no key for it. llama.cpp rounds it."""
    rope = {"rope_parameters": metadata.rope_parameters() | {"truncate": False}}
    return rope if _has_window(metadata) else rope | {"layer_types": [FULL] * metadata.num_layers}


def _has_window(metadata: GgufMetadata) -> bool:
    return bool(metadata.fields.optional_integer("attention.sliding_window"))
