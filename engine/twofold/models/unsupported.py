"""Reason why a checkpoint's family is not supported, from the keys of its config.json or GGUF header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What is missing, by the keys that need it: config.json's names, then GGUF's without the architecture.
_SIGNS: Final = (
    (
        "hyper-connections that mix their streams",
        ("hc_mult", "hyper_connection_rate", "hyper_connection.count"),
    ),
    (
        "state-space layers (Mamba)",
        ("state_size", "ssm_state_size", "ssm_cfg", "mamba_d_state", "d_state", "ssm.state_size"),
    ),
    ("Kimi's delta attention (KDA)", ("linear_attn_config", "linear_head_dim", "kda.head_dim")),
    ("recurrent layers (RWKV, RG-LRU)", ("rescale_every", "lru_width", "wkv.head_size")),
    ("lightning attention", ("linear_attn_alpha_factor",)),
    ("attention by learned relative positions", ("rel_extent",)),
    ("attention over convolved queries and keys (CCA)", ("cca_time0",)),
    ("attention that picks positions by a learned mask", ("keep_window_size",)),
    ("gates on its residual stream", ("residual_gate_temperature",)),
    ("experts that return their input", ("zero_expert_num",)),
    ("answers written by denoising blocks of tokens", ("canvas_length",)),
    (
        "norms that subtract the mean (LayerNorm)",
        ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    (
        "a sparse indexer other than DeepSeek-V3.2's",
        ("index_topk", "index_n_heads", "attention.indexer.top_k"),
    ),
)
# The same for families whose keys are those of others, by the beginning of their class's name.
_PARTS: Final = (
    ("Beam", "residual additions scaled by depth"),
    ("Dbrx", "norms that subtract the mean (LayerNorm)"),
    ("JetMoe", "experts of attention heads"),
    ("Kolibri1", "a router whose bias is added before its sigmoid"),
    ("Phimoe", "norms that subtract the mean (LayerNorm)"),
    ("UnlimitedOcr", "a window beside the whole prompt"),
)
_ENCODERS: Final = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def refusal(name: str, data: Mapping[str, Any]) -> str:
    """The end of a message about the family `name`: what it needs that is missing here, and where the list is.

    data: config.json's keys, or a GGUF file's without their prefix.
    """
    return f"is not supported: {missing_part(name, data)}; see `twofold models` or docs/guides/models.md for what is"


def missing_part(name: str, data: Mapping[str, Any]) -> str:
    """What the family `name` needs that is not built here, as a sentence's end; arguments as `refusal`'s."""
    text = data.get("text_config")
    keys = {**data, **text} if isinstance(text, dict) else dict(data)
    if (
        keys.get("is_encoder_decoder") is True
        or keys.get("attention.causal") is False
        or name.endswith(_ENCODERS)
    ):
        return "it is or has an encoder, and only decoders are run"
    if "vocab_size" not in keys and any(key in keys for key in ("image_size", "patch_size", "vision_config")):
        return "it reads images alone, and only text is run"
    for part, signs in _SIGNS:
        found = next((sign for sign in signs if keys.get(sign) not in (None, False)), None)
        if found is not None:
            return f"it needs {part} ({found})"
    for beginning, part in _PARTS:
        if name.startswith(beginning):
            return f"it needs {part}"
    return "its layers are not described here"
