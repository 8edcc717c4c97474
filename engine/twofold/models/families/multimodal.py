"""Multimodal families, their text. Rows of pictures come from transformers' encoders (`twofold.vision`).

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.picture_experts import PictureExperts
from twofold.blocks.picture_router import PictureRouter
from twofold.models.decoder import Axes, Decoder, TextPart
from twofold.models.families.dense import DENSE
from twofold.models.families.grouped_query import SIGMOID
from twofold.models.families.latent import one_group
from twofold.models.gguf_config import GgufMetadata


def _ocr(metadata: GgufMetadata) -> dict[str, Any]:
    """DeepSeek-OCR's router as llama.cpp computes it: the best experts of all, with the softmax's weights."""
    metadata.fields.only("expert_weights_norm", False)
    return {"topk_method": "greedy"}


MULTIMODAL: Final = {
    "qwen3_vl_moe": Decoder(
        "Qwen3-VL with experts (30B-A3B, 235B-A22B), its text: Qwen3-MoE.",
        "qwen3_vl_moe_text",
        attention={"norms": HeadNorms()},
        router={"renormalise": True},
        experts={"transposed": True},
        text=TextPart(axes=Axes((24, 20, 20), arrangement="interleaved")),
    ),
    "qwen3_vl": replace(
        DENSE["qwen3"],
        summary="Qwen3-VL without experts (2B to 32B), its text: Qwen3.",
        model_type="qwen3_vl_text",
        slides=lambda settings, layer: False,
        text=TextPart(axes=Axes((24, 20, 20), arrangement="interleaved")),
    ),
    "glm4v_moe": Decoder(
        "GLM-4.5V and 4.6V, their text: GLM-4.5 without norms of queries and keys.",
        "glm4v_moe_text",
        attention={"o_bias": False},
        rotated_share=0.5,
        dense={"gguf_norm": "post_attention_norm"},
        router=SIGMOID | {"gguf_norm": "post_attention_norm"},
        text=TextPart(axes=Axes((8, 12, 12))),
    ),
    "ernie4_5_vl_moe": Decoder(
        "ERNIE-4.5-VL (28B-A3B): ERNIE-4.5 in which tokens of pictures have a gate and experts of their own.",
        "ernie4_5_vl_moe_text",
        only={"use_bias": (False, None)},
        attention={"rotation": Rotation(neighbours=True)},
        router={"renormalise": True, "bias": True, "bias_name": "moe_statics.e_score_correction_bias"},
        kind_of_router=PictureRouter,
        kind_of_experts=PictureExperts,
        text=TextPart(
            images=tuple(
                f"{at}{part}.*"
                for at in ("", "model.") for part in ("vision_model", "vision_tower", "resampler_model")
            ),
            axes=Axes((22, 22, 20), arrangement="rows and columns in turn"),
        ),
        renamed=(("*.mlp.text_moe.", "*.mlp."), ("*.mlp.gate.moe_statics.", "*.mlp.moe_statics.")),
    ),
    "aria": Decoder(
        "Aria, its text: Llama's attention, softmax over the chosen experts, shared experts in every layer.",
        "aria_text",
        only={"mlp_bias": (False, None)},
        router={"score": "softmax_of_chosen", "renormalise": False, "gates": ("router",)},
        inner="intermediate_size",
        experts={
            "fused": (
                ("experts.gate_up_proj", "experts.down_proj"), ("experts.fc1.weight", "experts.fc2.weight"),
            ),
            "transposed": True,
        },
        text=TextPart(
            (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", "")),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ),
    ),
    "deepseek_ocr2": Decoder(
        "DeepSeek-OCR-2, its text: Llama's attention, DeepSeek-V2's router and shared experts.",
        "deepseek_ocr2_text",
        only={"topk_method": ("greedy", "group_limited_greedy"), "mlp_bias": (False, None)},
        restated=one_group,
        router={"group_score": "max"},
        gguf=_ocr,
        text=TextPart(
            (("model.language_model.", "model."),),
            (
                "model.vision_tower.*", "model.multi_modal_projector.*", "model.view_separator",
                *(f"model.{part}.*" for part in ("sam_model", "qwen2_model", "projector")), "model.view_seperator",
            ),
        ),
    ),
    "qwen3_omni_moe": Decoder(
        "Qwen3-Omni, the text part of its thinker: Qwen3-MoE; audio, vision, talker and codec are ignored.",
        "qwen3_omni_moe_text",
        attention={"norms": HeadNorms()},
        router={"renormalise": True},
        text=TextPart(
            (
                ("thinker.lm_head.", "lm_head."), ("thinker.model.language_model.", "model."),
                ("thinker.model.", "model."), ("model.language_model.", "model."),
            ),
            (
                "talker.*", "code2wav.*",
                *(f"{at}{part}.*" for at in ("thinker.", "model.", "") for part in ("audio_tower", "visual")),
            ),
            "thinker_config",
        ),
    ),
    "gemma3_vision": replace(
        DENSE["gemma3"],
        summary="Gemma 3 with images (4B to 27B), its text: tokens of a picture attend to one another.",
        attention={**DENSE["gemma3"].attention, "select": {"bidirectional": True}},
        text=TextPart(
            (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", "")),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ),
    ),
}  # fmt: skip
