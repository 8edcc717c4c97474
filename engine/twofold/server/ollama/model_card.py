"""The served model in Ollama's lists of models, as in llama.cpp."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from twofold.server.bridge.state import ServerState
from twofold.server.openai.model_card import rfc3339
from twofold.weights.gguf_file import SUFFIX, is_gguf

_FOREVER_S: Final = 2**63 / 1e9
"""292 years: the longest duration in Ollama."""


def ollama_card(state: ServerState, name: str) -> dict[str, Any]:
    """Ollama's list entry; unknown fields are empty. The digest covers name, size and modification time, because
    reading hundreds of gigabytes for a listing is too slow."""
    info = state.engine.info
    path, marks = Path(info.model), state.chat_marks
    size, written_s = _size_and_time(path)
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(written_s or state.started_s),
        "size": size,
        "digest": hashlib.sha256(f"{name}\n{size}\n{written_s}".encode()).hexdigest(),
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": [
            *(["completion"] if state.engine.pooling.generates else []),
            # Some clients offer no chat with such a model, so it is not told of every model.
            *(["embedding"] if state.engine.pooling.is_set else []),
            *(["tools"] if marks.calls_tools(state.engine.tokenizer.template_variables) else []),
            *(["thinking"] if marks.reasoning_parser else []),
        ],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf" if is_gguf(path) else "safetensors",
            "family": info.architecture,
            "families": [info.architecture],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def ollama_process(state: ServerState, name: str) -> dict[str, Any]:
    """The entry in the list of loaded models. It never expires: the time is as far off as Ollama's for keep_alive
    -1."""
    card, info = ollama_card(state, name), state.engine.info
    shared = ("name", "model", "size", "digest", "details")
    return {field: card[field] for field in shared} | {
        "expires_at": rfc3339(state.started_s + _FOREVER_S),
        "size_vram": info.num_slots * info.expert_bytes,
        "context_length": state.engine.max_context,
    }


def served_name(state: ServerState, name: str) -> str:
    """The model name without Ollama's default tag, which clients may append."""
    return name if name in state.model_names else name.removesuffix(":latest")


def _size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the weights on disk, and their modification time; zeros without weights."""
    files = [file for file in path.glob("*") if file.suffix in (SUFFIX, ".safetensors")] or [path]
    stats = [file.stat() for file in files if file.is_file()]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
