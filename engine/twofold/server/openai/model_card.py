"""The served model in lists of models, in OpenAI's format with Anthropic's fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from twofold.server.bridge.state import ServerState
from twofold.weights.gguf_file import model_name


def listed_names(state: ServerState) -> tuple[str, ...]:
    """The listed model names. ApiError 503 while there is no engine."""
    return state.model_names if state.engine else ()


def openai_card(state: ServerState, name: str) -> dict[str, Any]:
    """OpenAI's and vLLM's fields, and those that Anthropic's clients need: they use the same path."""
    engine = state.engine
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "twofold",
        "max_model_len": engine.max_context,
        "root": model_name(engine.info.model),
        "parent": None,
        "type": "model",
        "display_name": name,
        "created_at": rfc3339(state.started_s),
        "lifecycle": "active",
    }


def rfc3339(unix_s: float) -> str:
    """The time as text, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
