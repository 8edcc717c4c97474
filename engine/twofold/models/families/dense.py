"""Families without experts, by name.

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.residual import PostNorms
from twofold.models.decoder import Decoder
from twofold.models.families.grouped_query import HUNYUAN_NORMS, has_window
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import Settings


def _last_layers(settings: Settings, layer: int) -> bool:
    """Windows of Qwen's dense models: switched on by a key, from a layer on."""
    switched_on = settings.fields.boolean("use_sliding_window", False)
    return switched_on and layer >= settings.integer("max_window_layers")


def _gemma3_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Gemma 3's scale of scores, which files do not have (as in llama.cpp: 27B, of 62 layers, has its own), and its
    cap."""
    fields = metadata.fields
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, metadata.hidden_size // heads))
    return {
        "query_pre_attn_scalar": metadata.hidden_size // heads if metadata.num_layers == 62 else head_dim,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", above=True),
    }


_GEMMA_FFN: Final = {"activation": "gelu_tanh", "zero_centred": True, "norm": "pre_feedforward_layernorm"}
_GEMMA_NORMS: Final = PostNorms(
    ("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
)  # fmt: skip

DENSE: Final = {
    "llama": Decoder(
        "Llama 2 and 3, and dense models published as such: no experts.",
        "llama",
        only={"mlp_bias": (False, None)},
        attention={"project": {"gguf_pairs_neighbours": True}},
        router=None,
    ),
    "mistral": Decoder(
        "Mistral 7B, Nemo, Small: no experts.",
        "mistral",
        attention={"project": {"gguf_pairs_neighbours": True, "bias": False}, "o_bias": False},
        slides=has_window,
        router=None,
    ),
    "qwen2": Decoder(
        "Qwen2 and Qwen2.5: biases of q, k and v, windows in the last layers, no experts.",
        "qwen2",
        attention={"project": {"bias": True}, "o_bias": False},
        slides=_last_layers,
        router=None,
    ),
    "qwen3": Decoder(
        "Qwen3: per-head norms of queries and keys, no experts.",
        "qwen3",
        attention={"norms": HeadNorms()},
        slides=_last_layers,
        router=None,
    ),
    "seed_oss": Decoder(
        "Seed-OSS (36B): biases of q, k and v, no experts.",
        "seed_oss",
        only={"attention_out_bias": (False, None), "mlp_bias": (False, None)},
        attention={"o_bias": False},
        dense={"gguf_norm": "post_attention_norm"},
        router=None,
    ),
    "hunyuan_v1_dense": Decoder(
        "Hunyuan V1 dense (0.5B to 7B): per-head norms of queries and keys after the rotation, no experts.",
        "hunyuan_v1_dense",
        attention={"norms": HeadNorms("late")},
        stretched=True,
        router=None,
        renamed=HUNYUAN_NORMS,
    ),
    "gemma2": Decoder(
        "Gemma 2 (2B, 9B, 27B): windows in every other layer, capped scores, norms after blocks, no experts.",
        "gemma2",
        only={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)},
        scaled_embedding=True,
        attention={"zero_centred": True},
        slides=lambda settings, layer: layer % 2 == 0,
        residual=_GEMMA_NORMS,
        dense=_GEMMA_FFN,
        router=None,
    ),
    "gemma3": Decoder(
        "Gemma 3, text only (270M, 1B): windows in five of six layers, norms after blocks too, no experts.",
        "gemma3_text",
        only={
            "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        scaled_embedding=True,
        attention={"norms": HeadNorms(), "zero_centred": True},
        slides=lambda settings, layer: bool((layer + 1) % settings.fields.integer("sliding_window_pattern", 6)),
        local_theta=10_000.0,
        residual=_GEMMA_NORMS,
        dense=_GEMMA_FFN,
        router=None,
        gguf=_gemma3_gguf,
    ),
}  # fmt: skip
