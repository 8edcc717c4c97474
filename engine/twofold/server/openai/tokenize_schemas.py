"""Bodies of POST /tokenize and /detokenize, under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, RootModel, Tag

from twofold.server.http.bodies import Body, ModelName
from twofold.server.openai.messages import Text
from twofold.server.openai.schemas import ChatRequest, TokenId


class TokenizeTextRequest(Body):
    """A text, tokenised as by /v1/completions."""

    model: ModelName | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation with any fields of /v1/chat/completions; those that change the prompt have an effect."""

    return_token_strs: bool | None = None


def _kind_of_body(value: Any) -> str:
    """Tag of the intended kind, so that pydantic reports only its errors."""
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


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
