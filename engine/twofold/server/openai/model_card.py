"""The served model in lists of models, in OpenAI's format with Anthropic's fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.weights.gguf_file import model_name


def listed_models(state: ServerState) -> list[tuple[ServedModel, str]]:
    """The listed models, once per name. ApiError 503 while the single model loads, and while draining."""
    _ = state.max_context
    return state.listed


def openai_card(model: ServedModel, name: str) -> dict[str, Any]:
    """OpenAI's and vLLM's fields, llama.cpp's status, and the fields of Anthropic's clients, who use the same path."""
    started_s = model.server.started_s
    description = model.description
    adapter = model.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": int(started_s),
        "owned_by": "twofold",
        "max_model_len": None if description is None else description.max_context,
        "root": model_name(model.path if adapter is None else str(adapter.path)),
        "max_input_tokens": None if description is None else description.max_context,
        "max_tokens": None if description is None else description.max_context,
        "input_modalities": ["text", *(["image"] if model.reads_pictures else [])],
        "parent": None if adapter is None else model.name,
        "status": _status(model),
        "type": "model",
        "display_name": name,
        "created_at": rfc3339(started_s),
        "lifecycle": "active",
    }


def _status(model: ServedModel) -> dict[str, Any]:
    """The state under llama.cpp's names: a model that failed is unloaded, as the next request loads it again."""
    if model.state != "failed":
        return {"value": model.state}
    return {"value": "unloaded", "failed": True, "reason": model.problem}


def rfc3339(unix_s: float) -> str:
    """The time as text, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
