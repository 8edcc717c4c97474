"""Keys of tiny models' GGUF files as llama.cpp's converters write them, and whether they can express a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from twofold.blocks.ngram_tables import NgramTables

from tests.tiny_models.family import TinyFamily

_SLIDING, _FULL = "sliding_attention", "full_attention"
_KEYS: Final = {
    "n_group": "EXPERT_GROUP_COUNT", "topk_group": "EXPERT_GROUP_USED_COUNT",
    "n_shared_experts": "EXPERT_SHARED_COUNT", "num_shared_experts": "EXPERT_SHARED_COUNT",
    "moe_num_shared_experts": "EXPERT_SHARED_COUNT", "routed_scaling_factor": "EXPERT_WEIGHTS_SCALE",
    "moe_routed_scaling_factor": "EXPERT_WEIGHTS_SCALE", "route_scale": "EXPERT_WEIGHTS_SCALE",
    "router_scaling_factor": "EXPERT_WEIGHTS_SCALE", "moe_router_scaling_factor": "EXPERT_WEIGHTS_SCALE",
    "first_k_dense_replace": "LEADING_DENSE_BLOCK_COUNT", "num_dense_layers": "LEADING_DENSE_BLOCK_COUNT",
    "moe_layer_start_index": "LEADING_DENSE_BLOCK_COUNT",
    "moe_layer_interval": "INTERLEAVE_MOE_LAYER_STEP", "interleave_moe_layer_step": "INTERLEAVE_MOE_LAYER_STEP",
    "shared_expert_intermediate_size": "EXPERT_SHARED_FEED_FORWARD_LENGTH",
    "shared_intermediate_size": "EXPERT_SHARED_FEED_FORWARD_LENGTH",
    "share_expert_dim": "EXPERT_SHARED_FEED_FORWARD_LENGTH", "embedding_multiplier": "EMBEDDING_SCALE",
    "residual_multiplier": "RESIDUAL_SCALE", "logits_scaling": "LOGIT_SCALE",
    "final_logit_softcapping": "FINAL_LOGIT_SOFTCAPPING",
}  # fmt: skip
"""Keys of config.json by the name of the GGUF key in `gguf.Keys.LLM`."""
_BY_LAYER: Final = ("mimo2", "mellum", "laguna", "granite_swa", "hy_v3", "mistral4", "deepseek32", "step35")
"""Architectures whose files list kinds of layers."""
_UNBIASED: Final = ("gemma4", "deepseek2", "deepseek2-ocr", "laguna", "hy_v4", "dots3note")
"""Architectures whose files never have biases of attention."""
_BY_KIND: Final = ("mimo2", "mellum", "laguna")
"""Architectures with a rotation for each kind of layer."""


def says_all(model: TinyFamily) -> bool:
    """Whether the keys of a GGUF file can express this model's settings."""
    settings, arch = model.settings, model.row.gguf
    if model.rope_scaling is not None:
        return False
    if (known := _SAYS_ALL.get(arch)) is not None:
        return known(settings) and not (model.attention_bias and arch in _UNBIASED)
    if arch == "gemma3":  # files do not have the scale of scores
        return bool(settings["query_pre_attn_scalar"] == model.head_dim)
    if arch in _BY_LAYER:
        return not model.attention_bias or arch == "mellum"
    windows = settings.get("sliding_window") is not None and "sliding_window_pattern" not in settings
    afmoe = "global_attn_every_n_layers" in settings
    return not {"layer_types", "mlp_layer_types"} & set(settings) and (afmoe or not windows)


def _scout(settings: Mapping[str, Any]) -> bool:
    names = ("use_qk_norm", "attention_chunk_size", "floor_scale", "attn_scale", "no_rope_layer_interval")
    return tuple(settings[name] for name in names) == (True, 8192, 8192, 0.1, 4)


def _step(settings: Mapping[str, Any]) -> bool:
    rope = settings["rope_parameters"]
    return [rope[kind]["partial_rotary_factor"] for kind in (_FULL, _SLIDING)] == [0.5, 1.0]


def _leads(settings: Mapping[str, Any]) -> bool:
    """Whether no dense layer follows a mixture."""
    kinds = settings.get("mlp_layer_types", ())
    return list(kinds) == sorted(kinds)


def _dots(settings: Mapping[str, Any]) -> bool:
    """Whether both kinds of layers have one rank of queries and one rotated size."""
    rotated = settings["swa_head_dim"] - settings["swa_qk_nope_head_dim"]
    sizes = (settings["swa_q_lora_rank"], rotated)
    return _leads(settings) and sizes == (settings["q_lora_rank"], settings["qk_rope_head_dim"])


def _mscales(settings: Mapping[str, Any]) -> bool:
    return bool(settings["rope_parameters"]["mscale"] == settings["rope_parameters"]["mscale_all_dim"])


_SAYS_ALL: Final[dict[str, Callable[[Mapping[str, Any]], bool]]] = {
    "qwen3next": lambda settings: True,
    "qwen35moe": lambda settings: True,
    "qwen35": lambda settings: True,
    # Files have one table, and no seed.
    "qwen4exp": lambda settings: (
        settings["output_gate_type"] == "sigmoid"
        and len(settings["ple_layer_ids"]) < 2
        and settings.get("seed", 1234) == 1234
    ),
    "lfm2moe": lambda settings: bool(settings["norm_topk_prob"]),
    "gemma4": lambda settings: "per_layer_config" not in settings,
    "gpt-oss": lambda settings: "layer_types" not in settings,
    "llama4": _scout,
    "deepseek2": lambda settings: bool(settings.get("rope_interleave", True)),
    "deepseek2-ocr": lambda settings: settings["topk_method"] == "greedy" and _leads(settings),
    "qwen2moe": lambda settings: not settings.get("use_sliding_window"),
    "glm-dsa": lambda settings: False,
    "minimax-m3": lambda settings: settings["swiglu_limit"] == 7.0 and _leads(settings),
    "hy_v4": _leads,
    "dots3note": _dots,
    "granite_swa": lambda settings: len({theta for theta in settings["layer_rope_theta"] if theta}) == 1,
    "mistral4": _mscales,
    "step35": _step,
    "afmoe": lambda settings: bool(settings["mup_enabled"]),
    "laguna": lambda settings: not settings.get("moe_router_logit_softcapping"),
}


def add_keys(model: TinyFamily, writer: Any, package: Any, *, split_kv: bool) -> None:
    """Adds the keys that the family has beyond those of all models."""
    config, arch = model.text_config(), model.row.gguf
    for key, name in _KEYS.items():
        if (value := config.get(key)) is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(getattr(package.Keys.LLM, name).format(arch=arch), value)
    if model.has_experts and model.row.scores:
        writer.add_expert_gating_func(package.ExpertGatingFuncType[model.row.scores])
    if model.has_mtp and model.row.mtp_in_gguf:
        writer.add_nextn_predict_layers(1)
    if arch in ("laguna", "afmoe"):
        writer.add_expert_weights_norm(True)
    if arch == "hunyuan-moe":
        writer.add_expert_shared_count(1)
    _add_windows(model, writer, config)
    _add_rotation(model, writer, package, config)
    if "kv_lora_rank" in config:
        _add_latent(writer, config, split_kv)
    if arch in _OF_FAMILY:
        _OF_FAMILY[arch](model, writer, config)


def _add_windows(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    window, layers = config.get("sliding_window"), range(model.num_layers)
    if window is None:
        return
    writer.add_sliding_window(window)
    every = config.get("sliding_window_pattern") or config.get("global_attn_every_n_layers")
    if every is not None:
        writer.add_sliding_window_pattern([bool((n + 1) % every) for n in layers])
    elif "layer_types" in config and model.row.gguf != "gpt-oss":
        writer.add_sliding_window_pattern([kind == _SLIDING for kind in config["layer_types"]])


def _add_rotation(model: TinyFamily, writer: Any, package: Any, config: Mapping[str, Any]) -> None:
    arch, rope = model.row.gguf, config.get("rope_parameters") or {}
    full = rope.get(_FULL, rope)
    writer.add_rope_freq_base(rope_theta(model))
    if "kv_lora_rank" in config:
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    elif arch == "deepseek2-ocr":  # that of latent heads
        writer.add_rope_dimension_count(0)
    elif arch not in ("step35", "gemma4", "granitemoe", "granite_swa"):
        share = full.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(config.get("rotary_dim", int(model.head_dim * share)))
    if _FULL in rope and (arch in _BY_KIND or arch in ("step35", "gemma4")):
        writer.add_rope_freq_base_swa(rope[_SLIDING]["rope_theta"])
    scaling = model.rope_scaling or full
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        if "llama_4_scaling_beta" in scaling:
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
            writer.add_attn_temperature_length(scaling["original_max_position_embeddings"])


def rope_theta(model: TinyFamily) -> float:
    """RoPE base as converters write it."""
    rope = model.settings.get("rope_parameters") or {}
    if any(thetas := model.settings.get("layer_rope_theta", ())):
        return float(max(thetas))
    if alpha := rope.get("alpha"):
        return float(rope["rope_theta"] * alpha ** (model.head_dim / (model.head_dim - 2)))
    return float(rope.get(_FULL, rope).get("rope_theta", model.rope_theta))


def _add_latent(writer: Any, config: Mapping[str, Any], split_kv: bool) -> None:
    """Keys of latent attention; split_kv: of one latent head, else as older files."""
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent = config["kv_lora_rank"]
    heads = (1, latent + rope, latent) if split_kv else (config["num_attention_heads"], nope + rope, value)
    for add, number in zip(
        (writer.add_head_count_kv, writer.add_key_length, writer.add_value_length), heads, strict=True
    ):
        add(number)
    if split_kv:
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(value)
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    if "index_topk" in config:
        writer.add_indexer_top_k(config["index_topk"])
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
    if "mlp_layer_types" in config:
        writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))


def _add_mimo(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads * (1 + (kind == _SLIDING)) for kind in config["layer_types"]])
    writer.add_value_length(config["v_head_dim"])
    if config["attention_value_scale"] != 1.0:
        writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _add_granite(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_feed_forward_length(model.moe_intermediate_size)
    if (thetas := config.get("layer_rope_theta")) is not None:
        writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in thetas])


def _add_step(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    """Keys that Step has by layer."""
    counts = (config["num_attention_heads"], config["num_sliding_attention_heads"])
    writer.add_head_count([counts[kind == _SLIDING] for kind in config["layer_types"]])
    writer.add_head_count_kv([config["num_key_value_heads"]] * model.num_layers)
    for add, key in (
        (writer.add_swiglu_clamp_exp, "swiglu_limits"),
        (writer.add_swiglu_clamp_shexp, "swiglu_limits_shared"),
    ):
        if config[key] is not None:
            add([float(limit or 0.0) for limit in config[key]])


def _add_lfm2(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_head_count_kv([model.num_kv_heads * (kind == _FULL) for kind in config["layer_types"]])


def _add_delta(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    if model.row.gguf in ("qwen35moe", "qwen35", "qwen4exp"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_qwen4(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    """Keys by their text: the package does not know the architecture."""
    import gguf

    _add_delta(model, writer, config)
    ratios = [config["indexer_compress_ratio"] * ("linear" not in kind) for kind in config["layer_types"]]
    ratios += [0] * (model.num_gguf_layers - model.num_layers)  # llama.cpp's MTP layer attends to everything
    writer.add_array("qwen4exp.attention.compress_ratios", ratios)
    writer.add_uint32("qwen4exp.hyper_connection.count", config["hc_count"])
    writer.add_uint32("qwen4exp.hyper_connection.low_rank", config["hc_lowrank"])
    writer.add_indexer_head_count(config["indexer_n_heads"])
    writer.add_indexer_key_length(config["indexer_head_dim"])
    writer.add_indexer_top_k(config["indexer_budget"])
    tables = model.parsed.embedding.layer_inputs
    if not isinstance(tables, NgramTables):
        return
    hashes = tables.hashes[0]
    writer.add_array("qwen4exp.ple.layers", list(tables.layers))
    for key in ("ngram_size", "heads_per_ngram"):
        writer.add_uint32(f"qwen4exp.ple.{key}", config[key])
    writer.add_uint32("qwen4exp.ple.conv_kernel", config["ple_conv_kernel_size"])
    writer.add_uint32("qwen4exp.ple.eos_token_id", hashes.end_token)
    writer.add_embedding_length_per_layer_input(tables.columns)
    arrays = {
        "layer_multipliers": hashes.multipliers, "head_offsets": hashes.offsets, "head_vocab_sizes": hashes.sizes,
    }  # fmt: skip
    for key, values in arrays.items():
        kinds = gguf.GGUFValueType
        writer.add_key_value(f"qwen4exp.ple.{key}", list(values), kinds.ARRAY, sub_type=kinds.UINT64)


def _add_gemma4(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    full = [kind == _FULL for kind in config["layer_types"]]
    own = config["num_global_key_value_heads"] if config["attention_k_eq_v"] else None
    shared, dim = config["num_kv_shared_layers"], config["global_head_dim"]
    doubled = [config["use_double_wide_mlp"] and n >= len(full) - shared for n in range(len(full))]
    writer.add_head_count_kv([(own if each else None) or model.num_kv_heads for each in full])
    writer.add_feed_forward_length([model.intermediate_size * (1 + each) for each in doubled])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(model.head_dim)
    writer.add_value_length_swa(model.head_dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_dimension_count_swa(model.head_dim)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def _add_hyper_connections(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_uint32("hy_v4.hyper_connection.count", config["hc_mult"])
    writer.add_float32("hy_v4.hyper_connection.epsilon", config["hc_eps"])
    writer.add_float32("hy_v4.hyper_connection.magnitude", config["hc_magnitude"])
    writer.add_swiglu_clamp_exp([config["swiglu_limit"]] * model.num_layers)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_blocks(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    """Keys of MiniMax-M3's indexer."""
    writer.add_expert_weights_norm(True)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk_blocks"])
    writer.add_uint32("minimax-m3.attention.indexer.block_size", config["index_block_size"])
    writer.add_uint32("minimax-m3.attention.indexer.local_blocks", config["index_local_blocks"])


def _add_dots(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    """Keys of dots3-note's layers with a window."""
    counts, arch = (config["num_attention_heads"], config["swa_num_attention_heads"]), "dots3note.attention"
    writer.add_head_count([counts[kind == _SLIDING] for kind in config["layer_types"]])
    rope = config["swa_head_dim"] - config["swa_qk_nope_head_dim"]
    writer.add_uint32(f"{arch}.kv_lora_rank_swa", config["swa_kv_lora_rank"])
    writer.add_uint32(f"{arch}.key_length_mla_swa", config["swa_qk_nope_head_dim"] + rope)
    writer.add_uint32(f"{arch}.value_length_mla_swa", config["swa_v_head_dim"])
    writer.add_rope_freq_base_swa(config["swa_rope_theta"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_width(model: TinyFamily, writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(model.moe_intermediate_size)


_OF_FAMILY: Final[dict[str, Callable[[TinyFamily, Any, Mapping[str, Any]], None]]] = {
    "mimo2": _add_mimo, "granitemoe": _add_granite, "granite_swa": _add_granite, "step35": _add_step,
    "laguna": lambda model, writer, config: writer.add_head_count(config["num_attention_heads_per_layer"]),
    "lfm2moe": _add_lfm2, "qwen3next": _add_delta, "qwen35moe": _add_delta, "qwen35": _add_delta, "gemma4": _add_gemma4,
    "minimax-m2": _add_width, "hy_v4": _add_hyper_connections, "minimax-m3": _add_blocks, "dots3note": _add_dots,
    "qwen4exp": _add_qwen4,
    "ernie4_5-moe": lambda model, writer, config: writer.add_expert_shared_feed_forward_length(
        config["moe_num_shared_experts"] * model.moe_intermediate_size
    ),
    "deepseek2-ocr": lambda model, writer, config: writer.add_leading_dense_block_count(
        config["mlp_layer_types"].count("dense")
    ),
    "llama4": lambda model, writer, config: writer.add_vocab_size(config["vocab_size"]),
}  # fmt: skip
