"""Keys of config.json that each family has, with the values of missing ones, by transformers' model type.

These are the defaults of transformers' configuration classes, under the names of `keys.KEYS`. None: the key has no
default. All families have `SHARED`; a row lists what differs. `Settings` reads no other of `KEYS`, and no list of
kinds of layers but a row's, because published files hold keys of other families, which transformers ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SHARED: Final[Mapping[str, Any]] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "afmoe": {
        "vocab_size": 200_192, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16,
        "head_dim": 128, "intermediate_size": 6144, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-05,
        "sliding_window": 1024, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "num_experts": 64,
        "num_experts_per_tok": 6, "num_shared_experts": 2, "routed_scaling_factor": 1.0, "layer_types": None,
    },
    "aria_text": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 4096, "max_position_embeddings": 2048, "num_experts": 8, "num_experts_per_tok": 2,
        "num_shared_experts": 2,
    },
    "axk1": {
        "vocab_size": 163_840, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18_432, "first_k_dense_replace": 1,
        "max_position_embeddings": 32_768, "n_group": 8, "topk_group": 4, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "moe_intermediate_size": 2048, "num_experts": 192,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_layer_freq": 1, "mlp_layer_types": None,
    },
    "axk2": {
        "vocab_size": 163_840, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 5120, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "max_position_embeddings": 131_072, "n_group": None, "topk_group": None, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 384, "moe_intermediate_size": 512, "num_experts": 128,
        "kv_lora_rank": 128, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "index_topk": 2048, "index_n_heads": 16,
        "index_head_dim": 128, "mlp_layer_types": None,
    },
    "deepseek_ocr2_text": {
        "vocab_size": 102_400, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "num_experts": 64, "num_shared_experts": 2,
        "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "num_experts_per_tok": None,
        "moe_intermediate_size": 1407, "mlp_layer_types": None,
    },
    "deepseek_v2": {
        "vocab_size": 102_400, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None,
        "num_shared_experts": 2, "first_k_dense_replace": 0, "moe_layer_freq": 1,
        "max_position_embeddings": 2048, "kv_lora_rank": 512, "q_lora_rank": 1536, "num_experts": 64,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "norm_topk_prob": False, "v_head_dim": 128,
        "num_experts_per_tok": None, "moe_intermediate_size": 1407,
    },
    "deepseek_v3": {
        "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18_432, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "num_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "moe_intermediate_size": 2048, "num_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "max_position_embeddings": 4096,
    },
    "deepseek_v32": {
        "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18_432, "first_k_dense_replace": 3,
        "max_position_embeddings": 163_840, "n_group": 8, "topk_group": 4, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "moe_intermediate_size": 2048, "num_experts": 256,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "index_topk": 2048, "index_n_heads": 64,
        "index_head_dim": 128, "mlp_layer_types": None,
    },
    "dots1": {
        "vocab_size": 152_064, "hidden_size": 4608, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 10_944, "max_position_embeddings": 2048,
        "sliding_window": 4096, "max_window_layers": 62, "moe_intermediate_size": 1408,
        "num_shared_experts": None, "num_experts": None, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": None, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "layer_types": None,
    },
    "ernie4_5_moe": {
        "vocab_size": 103_424, "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "intermediate_size": 12_288, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "tie_word_embeddings": True,
        "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "mlp_layer_types": None,
    },
    "ernie4_5_vl_moe_text": {
        "vocab_size": 103_424, "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "intermediate_size": 12_288, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "tie_word_embeddings": True,
        "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "moe_intermediate_size": [1536, 512],
        "first_k_dense_replace": 1, "mlp_layer_types": None,
    },
    "dots3_note_text": {
        "vocab_size": 152_064, "hidden_size": 5120, "num_hidden_layers": 46, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 13_824, "max_position_embeddings": 524_288,
        "rms_norm_eps": 1e-05, "num_shared_experts": 1, "shared_expert_intermediate_size": 1536, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 1024, "moe_intermediate_size": 1536, "num_experts": 256, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "index_topk": 2048, "index_n_heads": 64,
        "index_head_dim": 128, "mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    },
    "exaone_moe": {
        "vocab_size": 102_400, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 16_384, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05, "sliding_window": 4096, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
        "layer_types": None, "mlp_layer_types": None,
    },
    "flex_olmo": {
        "vocab_size": 100_352, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 4096, "rope_theta": 500_000.0, "num_experts": 7,
        "num_experts_per_tok": 5, "norm_topk_prob": False,
    },
    "flint": {
        "vocab_size": 150_144, "hidden_size": 2048, "num_hidden_layers": 49, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "max_position_embeddings": 262_144, "sliding_window": 513, "mlp_only_layers": [0, 1],
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_tok": 6, "norm_topk_prob": True, "decoder_sparse_step": 1, "layer_types": None,
    },
    "gemma2": {
        "vocab_size": 256_000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "sliding_window": 4096, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "sliding_window": 4096,
        "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "layer_types": None,
    },
    "gemma4_text": {
        "vocab_size": 262_144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "global_head_dim": 512,
        "max_position_embeddings": 131_072, "sliding_window": 512, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "enable_moe_block": False,
        "num_experts": None, "moe_intermediate_size": [1536, 512],
    },
    "glm4_moe": {
        "vocab_size": 151_552, "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "intermediate_size": 10_944, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "num_experts": 128,
    },
    "glm4_moe_lite": {
        "vocab_size": 154_880, "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "intermediate_size": 10_240, "moe_intermediate_size": 1536,
        "num_shared_experts": 1, "num_experts": 64, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
        "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-05, "mlp_layer_types": None,
    },
    "glm4v_moe_text": {
        "vocab_size": 151_424, "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "intermediate_size": 10_944, "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-05, "attention_bias": True, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "num_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
    "glm_moe_dsa": {
        "vocab_size": 154_880, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 12_288, "rms_norm_eps": 1e-05,
        "first_k_dense_replace": 3, "max_position_embeddings": 202_752, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 2048, "moe_intermediate_size": 2048, "num_experts": 256,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "index_topk": 2048, "index_n_heads": 32,
        "index_head_dim": 128, "mlp_layer_types": None, "indexer_types": None,
    },
    "gpt_oss": {
        "vocab_size": 201_088, "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "attention_bias": True,
        "sliding_window": 128, "rms_norm_eps": 1e-05, "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0, "num_experts": 128, "num_experts_per_tok": 4, "layer_types": None,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    "granitemoe": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_experts": 8,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 0,
    },
    "granitemoe_swa": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_experts": 8,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 0, "sliding_window": 128, "layer_types": None,
    },
    "granitemoeshared": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_experts": 8,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 0,
    },
    "hunyuan_v1_dense": {
        "vocab_size": 290_943, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05,
    },
    "hunyuan_v1_moe": {
        "vocab_size": 290_943, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "num_experts": 1,
        "num_experts_per_tok": 1, "num_shared_experts": 1,
    },
    "hy_v3": {
        "vocab_size": 120_832, "hidden_size": 4096, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 13_312,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-05, "rope_theta": 11_158_840.0,
        "first_k_dense_replace": 1, "num_shared_experts": 1, "routed_scaling_factor": 2.826, "num_experts": 192,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "mlp_layer_types": None,
    },
    "hy_v4": {
        "vocab_size": 120_832, "hidden_size": 2816, "num_hidden_layers": 34, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 6912, "moe_intermediate_size": 768,
        "max_position_embeddings": 262_144, "rms_norm_eps": 1e-05, "num_experts": 256, "num_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "index_topk": 2048, "index_n_heads": 16, "index_head_dim": 128, "mlp_layer_types": None,
        "indexer_types": None,
    },
    "laguna": {
        "vocab_size": 100_352, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
        "max_position_embeddings": 131_072, "sliding_window": 512, "moe_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0,
        "layer_types": None, "mlp_layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    },
    "lfm2_moe": {
        "vocab_size": 65_536, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 7168, "norm_eps": 1e-05,
        "max_position_embeddings": 128_000, "rope_theta": 1_000_000.0, "conv_L_cache": 3,
        "first_k_dense_replace": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    },
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11_008, "max_position_embeddings": 2048,
    },
    "llama4_text": {
        "vocab_size": 202_048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "attention_chunk_size": 8192,
        "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1,
        "num_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16_384,
    },
    "mellum": {
        "vocab_size": 98_304, "hidden_size": 2304, "num_hidden_layers": 28, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7168,
        "max_position_embeddings": 131_072, "sliding_window": 1024, "norm_topk_prob": True, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 896, "layer_types": None, "mlp_layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    },
    "mimo_v2_flash": {
        "vocab_size": 152_576, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "intermediate_size": 16_384,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-05, "v_head_dim": 128, "sliding_window": 129,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "attention_value_scale": 0.707, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "layer_types": None, "mlp_layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5_000_000.0},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    },
    "minimax_m2": {
        "vocab_size": 200_064, "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536,
        "max_position_embeddings": 196_608, "rope_theta": 5_000_000.0, "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "minimax_m3_vl_text": {
        "vocab_size": 200_064, "hidden_size": 6144, "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072, "dense_intermediate_size": 12_288,
        "shared_expert_intermediate_size": 3072, "max_position_embeddings": 524_288, "rope_theta": 5_000_000.0,
        "num_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "mlp_layer_types": None, "index_n_heads": 4, "index_head_dim": 128,
        "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
        "sliding_window": 4096, "layer_types": None,
    },
    "mistral4": {
        "vocab_size": 131_072, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 12_288, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1,
        "max_position_embeddings": 1_048_576, "norm_topk_prob": True, "moe_intermediate_size": 2048,
        "num_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 256, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 64, "q_lora_rank": 1024,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral_large4_text": {
        "vocab_size": 204_800, "hidden_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 24_576, "rms_norm_eps": 1e-05, "first_k_dense_replace": 1,
        "max_position_embeddings": 1_048_576, "num_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 4,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64, "index_topk": 2048,
        "index_n_heads": 32, "index_head_dim": 128, "mlp_layer_types": None, "indexer_types": None,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
        },
    },
    "mixtral": {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "sliding_window": None,
    },
    "olmoe": {
        "vocab_size": 50_304, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "intermediate_size": 2048, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    "qwen2": {
        "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    },
    "qwen2_moe": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 32_768,
        "sliding_window": 4096, "max_window_layers": 28, "shared_expert_intermediate_size": 5632,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
        "norm_topk_prob": False, "layer_types": None, "mlp_only_layers": [],
    },
    "qwen3": {
        "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22_016,
        "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5632, "max_position_embeddings": 32_768,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "moe_intermediate_size": 512,
        "num_experts_per_tok": 8, "num_experts": 256,
    },
    "qwen3_5_text": {
        "vocab_size": 248_320, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12_288, "max_position_embeddings": 32_768,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    },
    "qwen3_moe": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "max_position_embeddings": 32_768,
        "sliding_window": 4096, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "moe_intermediate_size": 768, "num_experts": 128, "norm_topk_prob": False, "mlp_only_layers": [],
    },
    "qwen3_next": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5632, "max_position_embeddings": 32_768,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "moe_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "mlp_only_layers": [],
    },
    "qwen3_omni_moe_text": {
        "vocab_size": 3584, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18_944, "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "sliding_window": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "layer_types": None,
    },
    "qwen3_vl_text": {
        "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22_016, "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0, "tie_word_embeddings": True,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
        "tie_word_embeddings": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "seed_oss": {
        "vocab_size": 155_136, "hidden_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27_648,
        "max_position_embeddings": 524_288, "attention_bias": True,
    },
    "solar_open": {
        "vocab_size": 196_608, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0, "num_shared_experts": 1, "norm_topk_prob": True,
        "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "num_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
    "step3p5": {
        "vocab_size": 128_815, "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 11_264, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 128_000, "moe_intermediate_size": 1280, "num_experts": 288,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "shared_expert_intermediate_size": 1280,
        "sliding_window": None, "routed_scaling_factor": 1.0, "layer_types": None, "mlp_layer_types": None,
    },
}  # fmt: skip


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """All defaults of a model type."""
    return {**SHARED, **DEFAULTS[model_type]}
