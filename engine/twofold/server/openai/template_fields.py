"""Chat request fields for thinking, style and variables of the model's chat template."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, field_validator

MAX_TEMPLATE_VARIABLES_BYTES: Final = 16 * 1024
TEMPLATE_OWN_NAMES: Final = frozenset(
    (
        "self",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    )
)
"""Variables set by other fields or by Jinja itself."""

ShortText = Annotated[str, Field(max_length=64)]


class TemplateFields(BaseModel):
    """Names of OpenAI, vLLM, Ollama, OpenRouter and Anthropic; `template_variables` converts them."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ShortText | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | bool | None = None
    think: bool | ShortText | None = None
    enable_thinking: bool | None = None
    verbosity: ShortText | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _bounded(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        owned = TEMPLATE_OWN_NAMES & (value or {}).keys()
        if owned:
            raise ValueError(
                f"{sorted(owned)[0]!r} cannot be set here; leave it out, or use the field of that name"
            )
        if value and len(json.dumps(value)) > MAX_TEMPLATE_VARIABLES_BYTES:
            raise ValueError(f"must be at most {MAX_TEMPLATE_VARIABLES_BYTES} bytes of JSON")
        return value

    @property
    def effort(self) -> str | None:
        """The effort, by any of its names."""
        named = self.think if isinstance(self.think, str) else None
        return self.reasoning_effort or _text(self.reasoning, "effort") or named

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think, by any of the switches."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.think, bool):
            return self.think
        if isinstance(self.thinking, bool):
            return self.thinking
        kind = _text(self.thinking, "type")
        return None if kind is None else kind != "disabled"


def _text(value: Any, name: str) -> str | None:
    held = value.get(name) if isinstance(value, dict) else None
    return held if isinstance(held, str) else None
