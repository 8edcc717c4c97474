"""Tiny multimodal models by family: their settings, their tokens for pictures, their processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class PictureFamily:
    """A family's tiny model: its settings, its tokens for pictures, and its processor."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tokens: Mapping[str, str]
    """Key of the token's number in config.json ("" and a number where it has none): token."""
    processor: str
    image_processor: str
    sizes: Mapping[str, Any]
    """Settings of the image processor."""
    around: tuple[str, str] = ("", "")
    """What chat templates write before and after the mark of a picture."""
    mark: str = ""
    """The mark; "": the token whose key is image_token_id or image_token_index."""
    model_type: str = ""
    """Name of the configuration's class; "": the family's."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Settings beside those of text and vision."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens by the names that the processor asks the tokenizer for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the processor."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensors as they are published, by those with which transformers writes them."""


VOCABULARY: Final = 280
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEADS: Final = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
}  # fmt: skip
_DENSE: Final = {**_HEADS, "intermediate_size": 48}
_LATENT: Final = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "q_lora_rank": 24,
    "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DELTA: Final = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_QWEN_AROUND: Final = ("<|vision_start|>", "<|vision_end|>")
_QWEN_TOKENS: Final = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
_QWEN_EYE: Final = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 36, "out_hidden_size": 64,
}  # fmt: skip
_PATCHES: Final = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096},
}  # fmt: skip
_EYE: Final = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def _rope(section: list[int], **also: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **also}}


def _qwen(text: Mapping[str, Any], vision: Mapping[str, Any]) -> PictureFamily:
    return PictureFamily(
        text,
        _QWEN_EYE | vision,
        _QWEN_TOKENS,
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessor",
        _PATCHES,
        _QWEN_AROUND,
    )


def _gemma4(**text: Any) -> PictureFamily:
    return PictureFamily(
        {
            **_DENSE, "num_hidden_layers": 5, "global_head_dim": 24, "sliding_window": 9,
            "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
            "enable_moe_block": False, "attention_k_eq_v": False, "pad_token_id": 7, **text,
        },
        {
            **_EYE, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 256,
        },
        {
            "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
            "image_token_id": "<|image|>", "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
        },
        "Gemma4Processor", "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        model_type="gemma4",
        named={
            "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
            "video_token": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|image>",
            "eoa_token": "<image|>",
        },
    )  # fmt: skip


def _mistral(**text: Any) -> PictureFamily:
    return PictureFamily(
        _LATENT | text,
        {**_EYE, "model_type": "pixtral", "image_size": 64, "patch_size": 4},
        {
            "image_token_index": "[IMG]", "": "[IMG_BREAK]", " ": "[IMG_END]",
        },
        "PixtralProcessor", "PixtralImageProcessor",
        {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}},
        outer={"spatial_merge_size": 2, "tie_word_embeddings": False},
        settings={"patch_size": 4, "spatial_merge_size": 2},
    )  # fmt: skip


FAMILIES: Final[Mapping[str, PictureFamily]] = {
    "qwen3_5_moe": _qwen(
        {
            **_EXPERTS, **_HEADS, **_DELTA, "shared_expert_intermediate_size": 32,
            **_rope([1, 1, 0], partial_rotary_factor=0.25),
        },
        {"deepstack_visual_indexes": []},
    ),
    "qwen3_5": _qwen({**_DENSE, **_DELTA, **_rope([1, 1, 0], partial_rotary_factor=0.25)}, {}),
    "qwen4_exp": _qwen(
        {
            **_EXPERTS, **_HEADS, **_DELTA, "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 16,
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 9,
            "indexer_compress_ratio": 3, **_rope([1, 1, 0], partial_rotary_factor=0.25), "eos_token_id": 2,
            "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_size": 3, "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2,
        },
        {},
    ),
    "qwen3_vl_moe": _qwen(
        {**_EXPERTS, **_DENSE, **_rope([4, 2, 2])}, {"depth": 3, "deepstack_visual_indexes": [0, 2]}
    ),
    # As many layers as DeepStack has rows.
    "qwen3_vl": _qwen(
        {**_DENSE, "num_hidden_layers": 2, **_rope([4, 2, 2])}, {"deepstack_visual_indexes": [0, 1]}
    ),
    "glm4v_moe": PictureFamily(
        {
            **_DENSE, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            **_rope([2, 1, 1], partial_rotary_factor=0.5),
        },
        {
            "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "image_size": 48,
            "temporal_patch_size": 2, "out_hidden_size": 64, "intermediate_size": 48,
        },
        {
            "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
            "image_token_id": "<|image|>", "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        "Glm4vProcessor", "Glm4vImageProcessor", _PATCHES, ("<|begin_of_image|>", "<|end_of_image|>"),
    ),
    "ernie4_5_vl_moe": PictureFamily(
        {
            **_DENSE, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": [32, 20], "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], **_rope([3, 3, 2]),
        },
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
        {
            "image_start_token_id": "<|IMAGE_START|>", "image_end_token_id": "<|IMAGE_END|>",
            "image_token_id": "<|IMAGE_PLACEHOLDER|>", "video_start_token_id": "<|VIDEO_START|>",
            "video_end_token_id": "<|VIDEO_END|>", "video_token_id": "<|VIDEO_PLACEHOLDER|>",
        },
        "Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessor", {**_PATCHES, "temporal_patch_size": 1},
        ("<|IMAGE_START|>", "<|IMAGE_END|>"),
        named={
            f"{kind}{part}_token": f"<|{kind.upper()}_{name}|>"
            for kind in ("image", "video")
            for part, name in (("", "PLACEHOLDER"), ("_start", "START"), ("_end", "END"))
        },
    ),
    "gemma3": PictureFamily(
        {
            **_DENSE, "sliding_window": 9, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        {**_EYE, "image_size": 32, "patch_size": 4},
        {
            "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        "Gemma3Processor", "Gemma3ImageProcessor", {"size": {"height": 32, "width": 32}},
        mark="<start_of_image>",
        outer={"mm_tokens_per_image": 16},
        named={
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        },
        settings={"image_seq_length": 16},
    ),
    "gemma4_e2b": _gemma4(
        hidden_size_per_layer_input=10, vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2,
    ),
    "gemma4_26b_a4b": _gemma4(
        enable_moe_block=True, attention_k_eq_v=True, num_global_key_value_heads=1, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32, hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
    ),
    "gemma4_31b": _gemma4(
        attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
    ),
    "mistral3": _mistral(
        model_type="mistral4",
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral_large4": _mistral(
        num_hidden_layers=4, n_group=2, topk_group=1, index_topk=9, index_n_heads=2, index_head_dim=32,
        indexer_types=["full", "full", "full", "shared"], no_rope_layers=[1, 0, 1, 0], kv_source_layers=[0, 1, 0, 1],
    ),
    "kimi_k25": PictureFamily(
        {**_LATENT, "model_type": "deepseek_v3"},
        {**_EYE, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
        {
            "vision_start_token_id": "<|media_begin|>", "image_token_id": "<|media_pad|>",
            "vision_end_token_id": "<|media_end|>", "video_token_id": "<|kimi_k25_video_placeholder|>",
        },
        "Kimi_K25Processor", "Kimi_K25ImageProcessor", {"patch_size": 4},
        ("<|media_begin|>image", "<|media_end|>"),
        outer={"projection_hidden_size": 32, "tie_word_embeddings": False},
        renamed={"language_model.model.blocks.": "language_model.model.layers."},
    ),
    "llama4": PictureFamily(
        {
            **_DENSE, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 24, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1,
        },
        {
            **_EYE, "image_size": 16, "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32, "intermediate_size": 128,
        },
        {
            "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>", "image_token_index": "<|patch|>",
            "": "<|image|>", " ": "<|tile_x_separator|>", "  ": "<|tile_y_separator|>",
        },
        "Llama4Processor", "Llama4ImageProcessor",
        {"size": {"height": 16, "width": 16}, "max_patches": 4, "resize_to_max_canvas": False},
        mark="<|image|>",
        settings={"patch_size": 4},
    ),
    "step3p7": PictureFamily(
        {
            **_DENSE, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "share_expert_dim": 32, "sliding_window": 9, "num_sliding_attention_heads": 6,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        {**_EYE, "image_size": 32, "patch_size": 2, "mlp_ratio": 2.0, "max_position_embeddings": 256},
        {
            "image_token_id": "<im_patch>", "": "<im_start>", " ": "<im_end>", "  ": "<patch_start>",
            "   ": "<patch_end>", "    ": "<patch_newline>",
        },
        "Step3p7Processor", "Step3p7ImageProcessor",
        {
            "size": {"height": 32, "width": 32}, "patch_size": 24, "max_image_size": 48, "vision_patch_size": 2,
            "downsampler_stride": 4,
        },
    ),
}  # fmt: skip
