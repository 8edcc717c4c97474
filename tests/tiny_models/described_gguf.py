"""What GGUF files say of the families that transformers describes: keys as llama.cpp's converters write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.tiny_models.described import TinyDescribed

# Keys of config.json by the name of the GGUF key in `gguf.Keys`.
_GGUF_KEYS: Final = {
    "n_group": "EXPERT_GROUP_COUNT", "topk_group": "EXPERT_GROUP_USED_COUNT",
    "n_shared_experts": "EXPERT_SHARED_COUNT", "num_shared_experts": "EXPERT_SHARED_COUNT",
    "routed_scaling_factor": "EXPERT_WEIGHTS_SCALE", "moe_routed_scaling_factor": "EXPERT_WEIGHTS_SCALE",
    "route_scale": "EXPERT_WEIGHTS_SCALE", "router_scaling_factor": "EXPERT_WEIGHTS_SCALE",
    "moe_router_scaling_factor": "EXPERT_WEIGHTS_SCALE",
    "first_k_dense_replace": "LEADING_DENSE_BLOCK_COUNT",
}  # fmt: skip
NAMED_LIKE: Final = {
    "hy_v3": "dots1", "mellum": "qwen3moe", "laguna": "dots1", "granite_swa": "granitemoe", "deepseek32": "glm-dsa",
}  # fmt: skip
"""Architectures that the package does not know → one with the same names of tensors."""
FURTHER_NAMES: Final = {
    "self_attn.sinks": "attn_sinks",
    "self_attn.g_proj": "attn_gate",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.router.gate": "ffn_gate_inp",
    "mlp.expert_bias": "exp_probs_b",
    "mlp.experts.e_score_correction": "exp_probs_b",
}
_BY_LAYER: Final = (
    "mimo2",
    "mellum",
    "laguna",
    "granite_swa",
    "hy_v3",
    "mistral4",
    "deepseek32",
    "step35",
    "glm-dsa",
)
"""Architectures whose files list kinds of layers."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


def file_says_all(model: TinyDescribed) -> bool:
    """Whether the keys of a GGUF file can express this model's settings."""
    settings = model.settings
    if not model.gguf:
        return False
    if model.gguf not in _BY_LAYER:
        windows = settings.get("sliding_window") is not None and "sliding_window_pattern" not in settings
        afmoe = "global_attn_every_n_layers" in settings
        return not {"layer_types", "mlp_layer_types"} & set(settings) and (afmoe or not windows)
    sections = settings.get("rope_parameters", {})
    if model.gguf == "step35":
        return [sections[kind]["partial_rotary_factor"] for kind in (_FULL, _SLIDING)] == [0.5, 1.0]
    if model.gguf == "glm-dsa":
        return False
    if model.gguf == "granite_swa":
        return len({theta for theta in settings["layer_rope_theta"] if theta}) == 1
    if model.gguf == "mistral4":
        return sections["mscale"] == sections["mscale_all_dim"]
    return not settings.get("moe_router_logit_softcapping") and not model.attention_bias


def add_metadata(model: TinyDescribed, writer: Any, package: Any) -> None:
    """Adds the keys that the family has beyond those of all."""
    config, arch = model.text_config(), model.gguf
    if pattern := config.get("sliding_window_pattern"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([bool((n + 1) % pattern) for n in range(model.num_layers)])
    if every := config.get("global_attn_every_n_layers"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([bool((n + 1) % every) for n in range(model.num_layers)])
    if arch in _OF_FAMILY:
        _OF_FAMILY[arch](writer, config)
    if arch == "hunyuan-moe":
        writer.add_expert_shared_count(1)
    if arch == "afmoe":
        writer.add_expert_weights_norm(True)
    if "layer_types" in config and arch in ("gemma3", "mimo2", "mellum", "laguna", "granite_swa"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == _SLIDING for kind in config["layer_types"]])
    if arch == "gemma3":
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_parameters"][_FULL]["factor"])
    if arch in ("mimo2", "mellum", "laguna"):
        _add_rotations(writer, config, model.head_dim, package)
    if arch == "mistral4":
        _add_yarn(writer, config["rope_parameters"], package)
    if softcap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(softcap)
    rotated = config.get("partial_rotary_factor", 1.0)
    latent, by_kind = "kv_lora_rank" in config, arch in ("mimo2", "mellum", "laguna")
    if not model.gguf_pairs_neighbours and not latent and not by_kind:
        writer.add_rope_dimension_count(int(model.head_dim * rotated))
    if not model.experts_key:
        return
    writer.add_expert_gating_func(package.ExpertGatingFuncType[model.scores])
    for key, name in _GGUF_KEYS.items():
        if key in config:
            add = writer.add_float32 if isinstance(config[key], float) else writer.add_uint32
            add(getattr(package.Keys.LLM, name).format(arch=arch), config[key])


def _add_rotations(writer: Any, config: Mapping[str, Any], head_dim: int, package: Any) -> None:
    """Rotations by kind of layer."""
    full, sliding = (config["rope_parameters"][kind] for kind in (_FULL, _SLIDING))
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    if full["rope_type"] == "yarn":
        _add_yarn(writer, full, package)


def _add_yarn(writer: Any, rope: Mapping[str, Any], package: Any) -> None:
    writer.add_rope_scaling_type(package.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])


def _add_mimo(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads * (1 + (kind == _SLIDING)) for kind in config["layer_types"]])
    writer.add_value_length(config["v_head_dim"])
    if config["attention_value_scale"] != 1.0:
        writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _add_laguna(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_head_count(config["num_attention_heads_per_layer"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)


def _add_granite(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_array(
        "granite_swa.attention.rope_pattern", [theta > 0 for theta in config["layer_rope_theta"]]
    )


def _add_mla(writer: Any, config: Mapping[str, Any]) -> None:
    """Keys of latent attention and its indexer."""
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    if "index_topk" in config:
        writer.add_indexer_top_k(config["index_topk"])
    if "mlp_layer_types" in config:
        writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))


def _add_step(writer: Any, config: Mapping[str, Any]) -> None:
    """Keys that Step has by layer."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    counts = (config["num_attention_heads"], config["num_sliding_attention_heads"])
    writer.add_head_count([counts[slide] for slide in slides])
    writer.add_head_count_kv([config["num_key_value_heads"]] * len(slides))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    for add, limits in (
        (writer.add_swiglu_clamp_exp, config["swiglu_limits"]),
        (writer.add_swiglu_clamp_shexp, config["swiglu_limits_shared"]),
    ):
        if limits is not None:
            add([float(limit or 0.0) for limit in limits])


_OF_FAMILY: Final = {
    "glm-dsa": _add_mla, "deepseek32": _add_mla, "mistral4": _add_mla, "step35": _add_step, "mimo2": _add_mimo,
    "laguna": _add_laguna, "granite_swa": _add_granite,
}  # fmt: skip
