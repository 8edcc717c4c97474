"""Bodies of Ollama's API. What they mean, the requests say that they are translated to; here stands what that cannot
take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from twofold.server.fields import Unlisted
from twofold.server.messages import MAX_CALLS, MAX_MESSAGES, Name, Text
from twofold.server.schemas import MAX_TOOLS

_ELSEWHERE = "not supported here; use /v1/chat/completions"


def _refused(why: str) -> Any:
    """A field that must ask for nothing."""

    def check(value: Any) -> None:
        if value not in (None, False, "", [], {}):
            raise ValueError(f"not supported: {why}")

    return Annotated[Unlisted, AfterValidator(check)]


_NoImages = _refused("the model reads text only")


class OllamaFunction(BaseModel):
    name: Name
    arguments: dict[str, Any] | None = None


class OllamaCall(BaseModel):
    """A call that an earlier answer made. Many clients know no ids: calls and results then belong together by order."""

    id: Annotated[str, Field(max_length=256)] | None = None
    function: OllamaFunction


class OllamaMessage(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: _NoImages = None  # type: ignore[valid-type]
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    """Whose result it is."""
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class OllamaOptions(BaseModel):
    """Those that change the answer. Others are about memory and threads, which the server's own flags decide."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    """Negative: what the context leaves."""
    num_ctx: Annotated[int, Field(ge=1)] | None = None
    """The context is the server's; no more than that may be asked for."""
    stop: list[str] | str | None = None
    # Refused by the request they are translated to, unless they do nothing.
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class _Shared(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    """Left out: yes."""
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    """"json" or a schema."""
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    """The model stays."""
    logprobs: _refused(f"log probabilities are {_ELSEWHERE}") = None  # type: ignore[valid-type]
    images: _NoImages = None  # type: ignore[valid-type]


class OllamaChatRequest(_Shared):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class OllamaGenerateRequest(_Shared):
    """Body of POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    """The prompt is read as it is, without the chat template."""
    suffix: _refused("text cannot be inserted before other text") = None  # type: ignore[valid-type]
    template: _refused("only the model's own template is rendered") = None  # type: ignore[valid-type]
    context: _refused("send the conversation to /api/chat") = None  # type: ignore[valid-type]


class OllamaShowRequest(BaseModel):
    """Body of POST /api/show."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: Annotated[str, Field(max_length=512)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None
    """What `model` was called before."""
