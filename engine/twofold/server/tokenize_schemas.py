"""Bodies of POST /tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag

from twofold.server.messages import Text
from twofold.server.schemas import ChatRequest, TokenId


class TokenizeTextRequest(BaseModel):
    """A text, as /v1/completions would read it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation, with all that may stand in a request to /v1/chat/completions: what changes the prompt counts."""

    return_token_strs: bool | None = None


def _kind_of_body(value: Any) -> str:
    """Tells pydantic which error to report: that of the kind the caller meant."""
    return "a-chat" if isinstance(value, dict) and "messages" in value else "a-text"


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizeTextRequest, Tag("a-text")] | Annotated[TokenizeChatRequest, Tag("a-chat")],
            Discriminator(_kind_of_body),
        ]
    ]
):
    """Body of POST /tokenize: `prompt`, or `messages`."""


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
