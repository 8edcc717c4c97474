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


class Reasoning(BaseModel):
    """OpenAI's and OpenRouter's `reasoning`."""

    effort: ShortText | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Leave the thinking out of the answer."""
    max_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Thinking budget."""
    summary: ShortText | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think. A budget asks for it."""
        if self.enabled is None and self.max_tokens is not None:
            return self.max_tokens > 0
        return self.enabled


class TemplateFields(BaseModel):
    """Names of OpenAI, vLLM, Ollama, OpenRouter and Anthropic; `template_variables` converts them."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ShortText | None = None
    reasoning: Reasoning | None = None
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
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None) or named

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall think, by any of the switches."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.think, bool):
            return self.think
        if isinstance(self.thinking, bool):
            return self.thinking
        kind = self.thinking.get("type") if self.thinking else None
        if isinstance(kind, str):
            return kind != "disabled"
        return self.reasoning.thinks if self.reasoning else None
