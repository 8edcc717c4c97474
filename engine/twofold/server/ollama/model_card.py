"""The served model in Ollama's lists of models, as in llama.cpp."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from twofold.server.bridge.served_model import ServedModel
from twofold.server.bridge.state import ServerState
from twofold.server.openai.model_card import rfc3339
from twofold.weights.gguf_file import SUFFIX, is_gguf

_FOREVER_S: Final = 2**63 / 1e9
"""292 years: the longest duration in Ollama."""


def ollama_card(model: ServedModel, name: str) -> dict[str, Any]:
    """Ollama's list entry; unknown fields are empty. The digest covers name, size and modification time, because
    reading hundreds of gigabytes for a listing is too slow."""
    path, family = Path(model.path), "" if model.description is None else model.description.architecture
    size, written_s = _size_and_time(path)
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(written_s or model.server.started_s),
        "size": size,
        "digest": hashlib.sha256(f"{name}\n{size}\n{written_s}".encode()).hexdigest(),
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": list(_abilities(model)),
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf" if is_gguf(path) else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _abilities(model: ServedModel) -> Iterator[str]:
    """What the model gives, as far as is known before it is loaded, and what its chat template offers."""
    pooling = None if model.loaded_engine is None else model.loaded_engine.pooling
    if pooling is None or pooling.generates:
        yield "completion"
    # Some clients offer no chat with such a model, so it is not told of every model.
    if pooling is not None and pooling.is_set:
        yield "embedding"
    marks = model.chat_marks
    if marks.calls_tools(model.template_variables):
        yield "tools"
    if marks.reasoning_parser:
        yield "thinking"


def ollama_process(state: ServerState, model: ServedModel, name: str) -> dict[str, Any]:
    """The entry in the list of loaded models. One that never expires has a time as far off as Ollama's for keep_alive
    -1."""
    card, engine = ollama_card(model, name), model.engine
    shared = ("name", "model", "size", "digest", "details")
    forever_s = model.server.started_s + _FOREVER_S
    expires_s = forever_s if state.manager is None else min(forever_s, state.manager.expires_s(model))
    return {field: card[field] for field in shared} | {
        "expires_at": rfc3339(expires_s),
        "size_vram": engine.info.num_slots * engine.info.expert_bytes,
        "context_length": engine.max_context,
    }


def served_name(state: ServerState, name: str) -> str:
    """The model name without Ollama's default tag, which clients may append."""
    served = {each for model in state.models for each in model.names}
    return name if name in served else name.removesuffix(":latest")


def _size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the weights on disk, and their modification time; zeros without weights."""
    files = [file for file in path.glob("*") if file.suffix in (SUFFIX, ".safetensors")] or [path]
    stats = [file.stat() for file in files if file.is_file()]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
