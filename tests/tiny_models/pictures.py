"""Tiny multimodal models, written by transformers with random weights, and pictures for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from twofold.vision.encoder import PictureEncoder

from tests.tiny_models.writing import write_tiny_tokenizer

_FIRST: Final = 267
"""Number of the tokenizer's first token for pictures."""
VOCABULARY: Final = 272


@dataclass(frozen=True)
class PictureFamily:
    """A family's tiny model: its settings, its tokens for pictures, and its processor."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tokens: Mapping[str, str]
    """Key of the token's number in config.json: token. The first two surround a picture."""
    processor: str
    image_processor: str
    sizes: Mapping[str, Any]
    """Settings of the image processor."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens by the names that the processor asks the tokenizer for; it writes what surrounds a picture then."""

    def around(self, inner: str) -> str:
        """A picture's tokens, as chat templates write them."""
        if self.named:
            return inner
        before, after, *_ = self.tokens.values()
        return f"{before}{inner}{after}"


_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEADS: Final = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
}  # fmt: skip
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


def _rope(section: list[int], **also: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **also}}


FAMILIES: Final[Mapping[str, PictureFamily]] = {
    "qwen3_5_moe": PictureFamily(
        {
            **_EXPERTS, **_HEADS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            **_rope([1, 1, 0], partial_rotary_factor=0.25),
        },
        _QWEN_EYE | {"deepstack_visual_indexes": []},
        _QWEN_TOKENS, "Qwen3VLProcessor", "Qwen2VLImageProcessor", _PATCHES,
    ),
    "qwen3_vl_moe": PictureFamily(
        {**_EXPERTS, **_HEADS, "intermediate_size": 48, **_rope([4, 2, 2])},
        _QWEN_EYE | {"depth": 3, "deepstack_visual_indexes": [0, 2]},
        _QWEN_TOKENS, "Qwen3VLProcessor", "Qwen2VLImageProcessor", _PATCHES,
    ),
    "glm4v_moe": PictureFamily(
        {
            **_HEADS, "intermediate_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 4,
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
        "Glm4vProcessor", "Glm4vImageProcessor", _PATCHES,
    ),
    "gemma4": PictureFamily(
        {
            **_HEADS, "num_hidden_layers": 5, "global_head_dim": 24, "intermediate_size": 48, "sliding_window": 9,
            "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 272, "num_kv_shared_layers": 2,
            "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
            "enable_moe_block": False, "attention_k_eq_v": False, "pad_token_id": 7,
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 256,
        },
        {
            "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
            "image_token_id": "<|image|>", "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
        },
        "Gemma4Processor", "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        {
            "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
            "video_token": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|image>",
            "eoa_token": "<image|>",
        },
    ),
}  # fmt: skip


def write_picture_model(
    folder: Path, name: str, seed: int = 0, *, dtype: str = "float32", **text: Any
) -> Any:
    """Write the model with its tokenizer and processor; returns transformers' whole model in float32.

    dtype: of the file. text: other settings of the text part.
    """
    family = FAMILIES[name]
    of_text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **family.text,
        **text,
    }
    ids = {key: _FIRST + at for at, key in enumerate(family.tokens)}
    config = transformers.AutoConfig.for_model(
        name, text_config=of_text, vision_config=dict(family.vision), **ids
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            elif "norm" not in each:
                parameter.normal_(0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    model.float()
    write_tiny_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    assert tokenizer.convert_tokens_to_ids(next(iter(family.tokens.values()))) == _FIRST
    tokenizer.save_pretrained(folder)
    if family.named:
        file = folder / "tokenizer_config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": dict(family.named)})
        )
    settings = {
        "image_processor_type": family.image_processor,
        "processor_class": family.processor,
        "do_resize": True,
        **family.sizes,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def encoder_of(folder: Path) -> PictureEncoder:
    """The encoder of a written model."""
    text = ("model.language_model.", "lm_head.")
    tensors = load_file(folder / "model.safetensors")
    return PictureEncoder(folder, {name: each for name, each in tensors.items() if not name.startswith(text)})


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of soft shapes and noise."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 6, height))
    waves = [np.sin(x * rng.uniform(0.5, 3) + y * rng.uniform(0.5, 3) + rng.uniform(0, 6)) for _ in range(3)]
    values = 127 + 90 * np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
