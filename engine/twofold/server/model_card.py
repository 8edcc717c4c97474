"""The served model as lists of models show it: OpenAI's form, and Ollama's, which llama.cpp gives beside it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twofold.server.state import ServerState
from twofold.weights.gguf_file import SUFFIX, is_gguf


def listed_names(state: ServerState) -> tuple[str, ...]:
    """The names that lists show. ApiError 503 while there is no engine."""
    return state.model_names if state.engine else ()


def openai_card(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.engine
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "twofold",
        "max_model_len": engine.max_context,
    }


def ollama_card(state: ServerState, name: str) -> dict[str, Any]:
    """What is not known is an empty text. The digest is of name, size and time of writing: nobody reads a model's
    hundreds of gigabytes to be listed."""
    info = state.engine.info
    path, marks = Path(info.model), state.chat_marks
    size, written_s = _size_and_time(path)
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(written_s or state.started_s, UTC).isoformat(),
        "size": size,
        "digest": hashlib.sha256(f"{name}\n{size}\n{written_s}".encode()).hexdigest(),
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": [
            "completion",
            *(
                ["tools"]
                if marks.tool_call_parser and "tools" in state.engine.tokenizer.template_variables
                else []
            ),
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


def _size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the weights on disk, and when they were last written; zeros where there are none."""
    files = [file for file in path.glob("*") if file.suffix in (SUFFIX, ".safetensors")] or [path]
    stats = [file.stat() for file in files if file.is_file()]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
