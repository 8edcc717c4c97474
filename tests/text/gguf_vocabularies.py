"""Vocabularies as GGUF files have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from twofold.text.tokenizer import Tokenizer
from twofold.weights.gguf_file import GgufFile

from tests.tiny_models.gguf import sentencepiece_vocabulary


def as_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(Path("tiny.gguf"), fields, {}))


def sentencepiece_fields() -> dict[str, Any]:
    tokens, types, scores = sentencepiece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
