"""Request bodies of the OpenAI API, validated and bounded.

Fields we do not know are ignored, because clients send many. Fields we know, do not have and whose silent
absence would give a wrong answer (n > 1, logprobs, response_format …) are refused with their name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twofold.server.api_errors import CONTEXT_LENGTH, too_long
from twofold.types import SamplingParams

N = TypeVar("N", int, float)

MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_INT64: Final = 2**63 - 1


def _flatten_content(value: object) -> object:
    """A list of text parts becomes one text; any other kind of part is named in the error."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or "type" not in part:
            raise ValueError(
                f'part {index} of the content must be an object such as {{"type": "text", "text": "…"}}'
            )
        if part["type"] != "text":
            raise ValueError(
                f"part {index} of the content has type {str(part['type'])[:40]!r}; the model reads text only"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} of the content needs a string in 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _one_stop_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, Field(max_length=16 * 1024 * 1024)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_one_stop_or_many)
]


class Message(BaseModel):
    """One turn of a conversation. `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(_flatten_content)] = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content or ""}


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """What both endpoints share: which model, how to sample, how to answer."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    stop: Stops = None
    ignore_eos: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logit_bias: dict[str, Any] | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("only one answer per request is supported; send the request several times")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_logit_bias(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value:
            raise ValueError("logit_bias is not supported; leave it out")
        return value

    @model_validator(mode="after")
    def _usage_needs_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        return self

    @property
    def answer_limit(self) -> int | None:
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, defaults: SamplingParams, room: int) -> SamplingParams:
        """What the engine is asked for. `room` is the number of tokens the context has left for the answer.

        A longer wish is cut to `room`: many clients send the context's whole length as max_tokens.
        """
        limit = self.answer_limit
        return SamplingParams(
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(0, _or(self.top_k, defaults.top_k)),
            min_p=_or(self.min_p, defaults.min_p),
            presence_penalty=_or(self.presence_penalty, defaults.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, defaults.frequency_penalty),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            # numpy's generators take no negative seed; the low 63 bits keep different seeds different.
            seed=None if self.seed is None else self.seed & MAX_INT64,
            max_tokens=room if limit is None else min(limit, room),
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("logprobs are not supported; leave it out or send false")
        return value

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError('only {"type": "text"} is supported')
        return value

    @field_validator("tool_choice")
    @classmethod
    def _no_forced_tools(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if value not in (None, "none", "auto"):
            raise ValueError("tools are not supported; send 'none' or 'auto', or leave it out")
        return value

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _fits_the_context(ids: list[int], info: ValidationInfo) -> list[int]:
    max_context = (info.context or {}).get("max_context")
    if max_context is not None and len(ids) >= max_context:
        raise PydanticCustomError(
            CONTEXT_LENGTH, "{message}", {"message": too_long(str(len(ids)), max_context)}
        )
    return ids


TokenIds = Annotated[
    # fail_fast: a body of 8 MB would otherwise collect 2.6 million errors.
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
    Field(min_length=1, fail_fast=True),
    AfterValidator(_fits_the_context),
]


def _kind_of_prompt(value: object) -> str:
    """Tells pydantic which error to report: that of the kind the caller meant."""
    return "token-ids" if isinstance(value, list) else "a-text"


def _one_prompt(value: object) -> object:
    """A list of one prompt is that prompt; several are refused."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("only one prompt per request is supported; send the request several times")
        return value[0]
    return value


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions: a text, or its token ids."""

    prompt: Annotated[
        Annotated[Text, Tag("a-text")] | Annotated[TokenIds, Tag("token-ids")],
        Discriminator(_kind_of_prompt),
        BeforeValidator(_one_prompt),
    ]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, value: str | list[int]) -> str | list[int]:
        if not value:
            raise ValueError("the prompt is empty; give at least one character")
        return value

    @field_validator("echo", "suffix", "logprobs")
    @classmethod
    def _absent(cls, value: object) -> object:
        if value:
            raise ValueError("not supported; leave it out")
        return value

    @field_validator("best_of")
    @classmethod
    def _one_of_one(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("only 1 is supported")
        return value


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
