"""Projectors of towers with plain layers: Gemma 3, Llama 4 and Kimi-K2.5. See `projector_families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from twofold.vision.projector_family import Made, Names, ProjectorFamily, Settings, colours
from twofold.vision.projector_file import ProjectorFile


def _plain(file: ProjectorFile) -> Settings:
    """Settings of towers with plain layers."""
    return {
        "num_hidden_layers": file.num_layers,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_attention_heads": file.heads(),
        "image_size": file.size("image_size"),
        "patch_size": file.size("patch_size"),
    }


def _pictures(file: ProjectorFile, vision: Settings) -> Settings:
    return {"size": dict.fromkeys(("height", "width"), vision["image_size"]), **colours(file)}


def _gemma3(file: ProjectorFile) -> Settings:
    eps = file.fields.number("attention.layer_norm_epsilon", 1e-6, above=True)
    return _plain(file) | {"layer_norm_eps": eps, "vision_use_head": False}


def _gemma3_names(file: ProjectorFile) -> Names:
    """Old converters called the first product of a layer's two ffn_down."""
    if file.shape("v.blk.0.ffn_up.weight", 2)[1] == file.size("embedding_length"):
        return _GEMMA3
    products = (("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"))
    return _GEMMA3 | {_IN_GEMMA3 + theirs: f"v.blk.{{}}.{ours}" for theirs, ours in products}


def _gemma3_rows(file: ProjectorFile, vision: Settings) -> int:
    """Rows of a picture, each the mean of a square of patches."""
    side = vision["image_size"] // vision["patch_size"] // file.size("projector.scale_factor", 4, maximum=64)
    if side < 1:
        raise file.fields.error("image_size", vision["image_size"], "at least a square of patches")
    return int(side**2)


_LAYERS: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}  # fmt: skip
_GEMMA3_LAYERS: Final = _LAYERS | {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.out_proj": "attn_out",
}
_IN_GEMMA3: Final = "vision_tower.encoder.layers.{}."
_GEMMA3: Final[dict[str, str | Made]] = {
    **{_IN_GEMMA3 + theirs: f"v.blk.{{}}.{ours}" for theirs, ours in _GEMMA3_LAYERS.items()},
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_input_projection_weight": Made(
        ("mm.input_projection.weight",), lambda values: values
    ),
    # Files have the factor itself, transformers what is added to 1.
    "multi_modal_projector.mm_soft_emb_norm.weight": Made(
        ("mm.soft_emb_norm.weight",), lambda values: values - 1
    ),
}
_IN_LLAMA4: Final = "vision_model.model.layers.{}."
_LLAMA4_LAYERS: Final = _LAYERS | {
    "input_layernorm": "ln1", "self_attn.o_proj": "attn_out",
}  # fmt: skip
_LLAMA4: Final[dict[str, str | Made]] = {
    **{_IN_LLAMA4 + theirs: f"v.blk.{{}}.{ours}" for theirs, ours in _LLAMA4_LAYERS.items()},
    "vision_model.class_embedding": Made(("v.class_embd",), lambda values: values),
    "vision_model.positional_embedding_vlm": Made(("v.position_embd.weight",), lambda values: values),
    "vision_model.patch_embedding.linear": "v.patch_embd",
    "vision_model.layernorm_pre": "v.pre_ln",
    "vision_model.layernorm_post": "v.post_ln",
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
}


def _llama4_names(file: ProjectorFile) -> Names:
    """Newer converters give the norm after attention the name that it has in Gemma 4."""
    norm = f"v.blk.{{}}.{'attn_post_norm' if 'v.blk.0.attn_post_norm.weight' in file else 'ln2'}"
    return _LLAMA4 | {f"{_IN_LLAMA4}post_attention_layernorm": norm}


def _llama4(file: ProjectorFile) -> Settings:
    adapted = file.shape("mm.model.mlp.1.weight", 2)[0]
    return _plain(file) | {
        "norm_eps": file.fields.number("attention.layer_norm_epsilon", 1e-5, above=True),
        "pixel_shuffle_ratio": 1 / file.size("projector.scale_factor", 2, maximum=64),
        "projector_input_dim": adapted,
        "projector_output_dim": file.shape("mm.model.mlp.2.weight", 2)[0],
        "vision_output_dim": file.shape("mm.model.fc.weight", 2)[1],
    }


def _kimi(file: ProjectorFile) -> Settings:
    rows, columns, _ = file.shape("v.position_embd.weight", 3)
    merged = file.size("projector.scale_factor", 2, maximum=64)
    settings = {each: value for each, value in _plain(file).items() if each != "image_size"}
    return settings | {
        "pos_emb_height": rows,
        "pos_emb_width": columns,
        "merge_kernel_size": [merged, merged],
    }


def _kimi_names(file: ProjectorFile) -> Names:
    heads = file.heads()

    def part(number: int) -> Callable[[Tensor], Tensor]:
        def of_whole(values: Tensor) -> Tensor:
            own = values.chunk(3)[number]
            if number == 2:
                return own
            # Files: halves by axis of adjacent pairs; transformers: halves by place in the pair, axes in turn.
            by_axis = own.reshape(heads, 2, own.shape[0] // heads // 4, 2, -1)
            return by_axis.permute(0, 3, 2, 1, 4).reshape(own.shape)

        return of_whole

    joined = {
        f"vision_tower.layers.{{}}.attn.{name}_proj.{kind}": Made(
            (f"v.blk.{{}}.attn_qkv.{kind}",), part(number)
        )
        for number, name in enumerate("qkv")
        for kind in ("weight", "bias")
    }
    return _KIMI | joined


_KIMI: Final[dict[str, str | Made]] = {
    "vision_tower.patch_embed.proj": "v.patch_embd",
    "vision_tower.patch_embed.pos_emb.position_embeddings": Made(("v.position_embd.weight",), lambda values: values),
    "vision_tower.layers.{}.norm1": "v.blk.{}.ln1", "vision_tower.layers.{}.norm2": "v.blk.{}.ln2",
    "vision_tower.layers.{}.attn.proj": "v.blk.{}.attn_out", "vision_tower.layers.{}.mlp.fc1": "v.blk.{}.ffn_up",
    "vision_tower.layers.{}.mlp.fc2": "v.blk.{}.ffn_down", "vision_tower.final_layernorm": "v.post_ln",
    "mm_projector.pre_norm": "mm.input_norm", "mm_projector.in_proj": "mm.1", "mm_projector.out_proj": "mm.2",
}  # fmt: skip


def _kimi_pictures(file: ProjectorFile, vision: Settings) -> Settings:
    patch = vision["patch_size"]
    most = file.fields.optional_integer("image_max_pixels", minimum=1)
    limit = {} if most is None else {"max_patches": max(1, most // patch**2)}
    return {"patch_size": patch, "merge_size": vision["merge_kernel_size"][0], **limit, **colours(file)}


PLAIN: Final[Mapping[str, ProjectorFamily]] = {
    "gemma3": ProjectorFamily(
        {"gemma3": "gemma3"},
        _gemma3,
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        _pictures,
        {
            "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        _gemma3_names,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        lambda file, vision: {"mm_tokens_per_image": _gemma3_rows(file, vision)},
        lambda file, vision: {"image_seq_length": _gemma3_rows(file, vision)},
    ),
    "llama4": ProjectorFamily(
        {"llama4": "llama4"},
        _llama4,
        "Llama4Processor",
        "Llama4ImageProcessor",
        _pictures,
        {
            "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>",
            "image_token_index": "<|patch|>",
        },
        _llama4_names,
        whole=lambda file, vision: {
            "patch_size": vision["patch_size"], "pixel_shuffle_ratio": vision["pixel_shuffle_ratio"],
        },
    ),
    "kimik25": ProjectorFamily(
        {"deepseek2": "kimi_k25"},
        _kimi,
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        _kimi_pictures,
        {
            "vision_start_token_id": "<|media_begin|>", "vision_end_token_id": "<|media_end|>",
            "image_token_id": "<|media_pad|>",
        },
        _kimi_names,
        outer=lambda file, vision: {
            "projection_hidden_size": vision["hidden_size"],
            "projection_layer_norm_eps": file.fields.number("attention.layer_norm_epsilon", 1e-5, above=True),
        },
    ),
}  # fmt: skip
