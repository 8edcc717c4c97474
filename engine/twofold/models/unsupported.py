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
    (
        "recurrent layers (RWKV, RG-LRU, KDA)",
        ("rescale_every", "lru_width", "linear_attn_config", "wkv.head_size", "kda.head_dim"),
    ),
    (
        "a sparse indexer other than DeepSeek-V3.2's",
        ("index_topk", "index_n_heads", "attention.indexer.top_k"),
    ),
)
_ENCODERS: Final = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def refusal(name: str, data: Mapping[str, Any]) -> str:
    """The end of a message about the family `name`: what it needs that is missing here, and where the list is.

    data: config.json's keys, or a GGUF file's without their prefix.
    """
    return (
        f"is not supported: {_missing(name, data)}; see `twofold models` or docs/guides/models.md for what is"
    )


def _missing(name: str, data: Mapping[str, Any]) -> str:
    text = data.get("text_config")
    keys = {**data, **text} if isinstance(text, dict) else dict(data)
    for part, signs in _SIGNS:
        found = next((sign for sign in signs if keys.get(sign) not in (None, False)), None)
        if found is not None:
            return f"it needs {part} ({found})"
    if (
        keys.get("is_encoder_decoder") is True
        or keys.get("attention.causal") is False
        or name.endswith(_ENCODERS)
    ):
        return "it is or has an encoder, and only decoders are run"
    if "vocab_size" not in keys and any(key in keys for key in ("image_size", "patch_size", "vision_config")):
        return "it reads images alone, and only text is run"
    return "its layers are not described here"
