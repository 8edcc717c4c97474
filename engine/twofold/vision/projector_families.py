"""Types of projector files: the settings and tensors of each.

References: llama.cpp's converters for what the files hold, transformers' `models/NAME` for what its classes expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from twofold.vision.plain_projectors import PLAIN
from twofold.vision.projector_family import Made, Names, ProjectorFamily, Settings, colours
from twofold.vision.projector_file import ProjectorFile


def _tower(file: ProjectorFile, **further: Any) -> Settings:
    """Settings of towers whose pictures have a time axis of two frames."""
    return {
        "depth": file.num_layers,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_heads": file.heads(),
        "patch_size": file.size("patch_size"),
        "temporal_patch_size": _FRAMES,
        "out_hidden_size": file.size("projection_dim"),
        **further,
    }


_FRAMES: Final = 2
"""Frames of a patch; a picture fills all of them."""
_TWO_FRAMES: Final = Made(
    ("v.patch_embd.weight", "v.patch_embd.weight.1"), lambda *frames: torch.stack(frames, 2)
)


def _patches(file: ProjectorFile, vision: Settings, *, pixels: Settings, frames: int = 1) -> Settings:
    """Settings of image processors that cut patches of two frames. frames: of which `size` counts the pixels."""
    least, most = (
        file.fields.optional_integer("image_min_pixels"),
        file.fields.optional_integer("image_max_pixels"),
    )
    limits = (
        {}
        if least is None or most is None
        else {"shortest_edge": least * frames, "longest_edge": most * frames}
    )
    return {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": _FRAMES,
        **colours(file),
        **({"size": limits or pixels} if limits or pixels else {}),
    }


def _side(file: ProjectorFile) -> int:
    """Positions along each side of the square table of positions."""
    rows = file.shape("v.position_embd.weight", 2)[0]
    side = math.isqrt(rows)
    if side * side != rows:
        raise file.wrong("v.position_embd.weight", f"has {rows} rows", "a square number of them")
    return side


def _qwen3_vl(file: ProjectorFile) -> Settings:
    return _tower(
        file,
        spatial_merge_size=file.size("spatial_merge_size", 2, maximum=64),
        num_position_embeddings=_side(file) ** 2,
        deepstack_visual_indexes=_deep_layers(file),
    )


def _deep_layers(file: ProjectorFile) -> list[int]:
    """Layers whose output has a merger of its own."""
    return [layer for layer in range(file.num_layers) if f"v.deepstack.{layer}.norm.weight" in file]


def _qwen3_vl_names(file: ProjectorFile) -> Names:
    deep: dict[str, str | Made] = {
        f"visual.deepstack_merger_list.{n}.{theirs}": f"v.deepstack.{layer}.{ours}"
        for n, layer in enumerate(_deep_layers(file))
        for theirs, ours in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2"))
    }
    return _QWEN3_VL | deep


_BLOCKS: Final[dict[str, str | Made]] = {
    "visual.blocks.{}.norm1": "v.blk.{}.ln1", "visual.blocks.{}.norm2": "v.blk.{}.ln2",
    "visual.blocks.{}.attn.qkv": "v.blk.{}.attn_qkv", "visual.blocks.{}.attn.proj": "v.blk.{}.attn_out",
    "visual.patch_embed.proj.weight": _TWO_FRAMES, "visual.patch_embed.proj": "v.patch_embd",
}  # fmt: skip
_QWEN3_VL: Final[dict[str, str | Made]] = _BLOCKS | {
    "visual.pos_embed": "v.position_embd",
    "visual.blocks.{}.mlp.linear_fc1": "v.blk.{}.ffn_up", "visual.blocks.{}.mlp.linear_fc2": "v.blk.{}.ffn_down",
    "visual.merger.norm": "v.post_ln", "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2",
}  # fmt: skip
_GATED: Final = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
_GLM4V: Final[dict[str, str | Made]] = _BLOCKS | {
    **{f"visual.blocks.{{}}.mlp.{theirs}": f"v.blk.{{}}.ffn_{ours}" for theirs, ours in _GATED},
    **{f"visual.merger.{theirs}": f"mm.{ours}" for theirs, ours in _GATED},
    "visual.embeddings.position_embedding": "v.position_embd", "visual.post_conv_layernorm": "v.norm_embd",
    "visual.post_layernorm": "v.post_ln", "visual.downsample": "mm.patch_merger", "visual.merger.proj": "mm.model.fc",
    "visual.merger.post_projection_norm": "mm.post_norm",
}  # fmt: skip


def _glm4v(file: ProjectorFile) -> Settings:
    return _tower(
        file,
        spatial_merge_size=file.shape("mm.patch_merger.weight", 4)[-1],
        image_size=_side(file) * file.size("patch_size"),
        rms_norm_eps=file.fields.number("attention.layer_norm_epsilon", 1e-5, above=True),
    )


def _gemma4(file: ProjectorFile) -> Settings:
    head = file.shape("v.blk.0.attn_q_norm.weight", 1)[0]
    return {
        "num_hidden_layers": file.num_layers,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_attention_heads": file.heads(),
        "num_key_value_heads": file.shape("v.blk.0.attn_k.weight", 2)[0] // head,
        "head_dim": head,
        "patch_size": file.size("patch_size"),
        "pooling_kernel_size": file.size("projector.scale_factor", 3, maximum=64),
        "position_embedding_size": file.shape("v.position_embd.weight", 3)[1],
        "rms_norm_eps": file.fields.number("attention.layer_norm_epsilon", 1e-6, above=True),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in file,
        "standardize": "v.std_scale" in file,
    }


_GEMMA4_LAYERS: Final = {
    "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_GEMMA4_PRODUCTS: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LAYER: Final = "vision_tower.encoder.layers.{}."
_LIMITS: Final = ("input_min", "input_max", "output_min", "output_max")
_GEMMA4: Final[Names] = {
    **{_LAYER + theirs: f"v.blk.{{}}.{ours}" for theirs, ours in _GEMMA4_LAYERS.items()},
    **{f"{_LAYER}{theirs}.linear": f"v.blk.{{}}.{ours}" for theirs, ours in _GEMMA4_PRODUCTS.items()},
    **{
        f"{_LAYER}{theirs}.{limit}": Made((f"v.blk.{{}}.{ours}.{limit}",), lambda value: value.reshape(()))
        for theirs, ours in _GEMMA4_PRODUCTS.items()
        for limit in _LIMITS
    },
    # Patches there are [colours, rows, columns], for a convolution.
    "vision_tower.patch_embedder.input_proj.weight": Made(
        ("v.patch_embd.weight",), lambda patches: patches.movedim(1, -1).flatten(1).contiguous()
    ),
    "vision_tower.patch_embedder.position_embedding_table": Made(
        ("v.position_embd.weight",), lambda table: table
    ),
    "vision_tower.std_bias": Made(("v.std_bias",), lambda bias: bias),
    "vision_tower.std_scale": Made(("v.std_scale",), lambda scale: scale),
    "embed_vision.embedding_projection": "mm.input_projection",
}


def _gemma4_pictures(file: ProjectorFile, vision: Settings) -> Settings:
    return {each: vision[each] for each in ("patch_size", "pooling_kernel_size")}


FAMILIES: Final[Mapping[str, ProjectorFamily]] = {
    "qwen3vl_merger": ProjectorFamily(
        {
            "qwen3vlmoe": "qwen3_vl_moe", "qwen3vl": "qwen3_vl", "qwen35moe": "qwen3_5_moe", "qwen35": "qwen3_5",
            "qwen4exp": "qwen4_exp",
        },
        _qwen3_vl,
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessor",
        # The publisher's limits, which files lack.
        lambda file, vision: _patches(file, vision, pixels={"shortest_edge": 65_536, "longest_edge": 16_777_216}),
        {
            "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
            "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        },
        _qwen3_vl_names,
    ),
    "glm4v": ProjectorFamily(
        {"glm4moe": "glm4v_moe"},
        _glm4v,
        "Glm4vProcessor",
        "Glm4vImageProcessor",
        lambda file, vision: _patches(file, vision, pixels={}, frames=_FRAMES),
        {
            "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
            "image_token_id": "<|image|>", "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        lambda file: _GLM4V,
    ),
    "gemma4v": ProjectorFamily(
        {"gemma4": "gemma4"},
        _gemma4,
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        _gemma4_pictures,
        {"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "image_token_id": "<|image|>"},
        lambda file: _GEMMA4,
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    ),
    **PLAIN,
}  # fmt: skip
"""By the type that a file names."""
