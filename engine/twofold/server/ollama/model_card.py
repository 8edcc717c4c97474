"""The served model in Ollama's lists of models, as in llama.cpp."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.ollama.model_sizes import model_sizes
from twofold.server.openai.fill_in import fill_marks
from twofold.server.openai.model_card import listed_models, rfc3339
from twofold.weights.gguf_file import SUFFIX, is_gguf

_FOREVER_S: Final = 2**63 / 1e9
"""292 years: the longest duration in Ollama."""


def ollama_card(model: ServedModel, name: str) -> dict[str, Any]:
    """Ollama's list entry; unknown fields are empty. The digest covers name, size and modification time, because
    reading hundreds of gigabytes for a listing is too slow."""
    path, family = Path(model.path), "" if model.description is None else model.description.architecture
    size, written_s = _size_and_time(path)
    sizes = model_sizes(path, written_s)
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
            "parent_model": model.name if name in model.adapters else "",
            "format": "gguf" if is_gguf(path) else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": sizes.text,
            "quantization_level": sizes.format,
        },
    }


async def ollama_cards(state: ServerState) -> list[dict[str, Any]]:
    """Cards of the listed models, made on a thread: the headers of a large model take a second."""
    listed = listed_models(state)
    return await asyncio.to_thread(lambda: [ollama_card(model, name) for model, name in listed])


def model_info(model: ServedModel) -> dict[str, Any]:
    """Facts of the model under GGUF's names, as clients look for them."""
    path, about = Path(model.path), model.description
    family = "" if about is None else about.architecture
    info: dict[str, Any] = {"general.architecture": family, "general.basename": model.name}
    sizes = model_sizes(path, _size_and_time(path)[1])
    if sizes.num_parameters:
        info["general.parameter_count"] = sizes.num_parameters
    if about is not None:
        info[f"{family}.context_length"] = about.max_context
    engine = model.loaded_engine
    if engine is not None:
        info[f"{family}.block_count"] = engine.info.num_layers
        info[f"{family}.embedding_length"] = engine.pooling.size
        if engine.info.num_experts:
            info[f"{family}.expert_count"] = engine.info.num_experts
            info[f"{family}.expert_used_count"] = engine.info.top_k
    return info


def _abilities(model: ServedModel) -> Iterator[str]:
    """Outputs of the model, as known before it is loaded, and features of its chat template."""
    pooling = None if model.loaded_engine is None else model.loaded_engine.pooling
    if pooling is None or pooling.generates:
        yield "completion"
    if pooling is None or not pooling.refusal:
        yield "embedding"
    if model.loaded_engine is not None and fill_marks(model.loaded_engine.tokenizer) is not None:
        yield "insert"
    marks = model.chat_marks
    if marks.calls_tools(model.template_variables):
        yield "tools"
    if marks.reasoning_parser:
        yield "thinking"
    if model.reads_pictures:
        yield "vision"


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
    served = {each for _, each in state.listed}
    return name if name in served else name.removesuffix(":latest")


def _size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the weights on disk, and their modification time; zeros without weights."""
    files = [file for file in path.glob("*") if file.suffix in (SUFFIX, ".safetensors")] or [path]
    stats = [file.stat() for file in files if file.is_file()]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
