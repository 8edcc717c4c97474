"""Request bodies of Ollama's API. Most fields are validated by the requests that they are translated to; this file
holds the rest."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from twofold.api.sampling_ranges import SAMPLING_RANGES
from twofold.server.http.bodies import Body, ModelName, refused
from twofold.server.openai.completion_schema import fits_the_context
from twofold.server.openai.messages import MAX_CALLS, MAX_MESSAGES, CalledFunction, Role, Text
from twofold.server.openai.schemas import MAX_TOOLS, NumLogprobs, PassedSampling, TokenId
from twofold.server.pooling.schemas import MAX_INPUTS

Context = Annotated[list[TokenId], Field(fail_fast=True), AfterValidator(fits_the_context)]


class OllamaCall(BaseModel):
    """A tool call of an earlier answer. Many clients send no ids: calls and results are then matched by order."""

    id: Text | None = None
    function: CalledFunction


class OllamaMessage(BaseModel):
    role: Role
    content: Any = None
    """Text; read as a chat message's."""
    thinking: Text | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    """Name of the tool that returned this result."""
    tool_call_id: Text | None = None


class OllamaOptions(PassedSampling):
    """Options that change the answer. Others concern memory and threads, which the server's own flags set; so does
    num_ctx, which Ollama also cuts to the model's limit."""

    repeat_penalty: float | None = None
    num_predict: int | None = None
    """Token limit; 0 and negative: the rest of the context."""
    # Ignored with a line in the log: settings of samplers that do not exist here.
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    def passed_on(self) -> dict[str, Any]:
        """Fields of OpenAI's requests. As in Ollama, a value beyond a field's range is the nearest one within."""
        given = super().passed_on() | {"repetition_penalty": self.repeat_penalty or None}
        return given | {
            name: min(max(given[name], allowed.low), allowed.high)
            for name, allowed in SAMPLING_RANGES.items()
            if given.get(name) is not None
        }

    @property
    def ignored(self) -> list[str]:
        """Options that would change the answer in Ollama and have no effect here."""
        without_effect = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
        return [name for name, value in without_effect.items() if getattr(self, name) not in (None, value)]


class OllamaRequest(Body):
    """Fields of both requests."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    """Streams by default."""
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    """"json" or a schema."""
    think: bool | Annotated[str, Field(max_length=64)] | None = None
    """Whether to think, or the effort: low, medium, high or another word that the template knows."""
    keep_alive: float | str | None = None
    """How long the model stays loaded afterwards; a single model always does."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    """Used with `logprobs` only."""
    images: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _merge_top_level_options(cls, value: Any) -> Any:
        """Take sampling fields that stand beside `options`, where AI SDK's provider writes them."""
        options = value.get("options") if isinstance(value, dict) else value
        if not isinstance(value, dict) or not (options is None or isinstance(options, dict)):
            return value
        top_level = {name: value[name] for name in OllamaOptions.model_fields if name in value}
        limits = (value.get(name) for name in ("max_output_tokens", "max_tokens"))
        limit = next((given for given in limits if given is not None), None)
        if limit is not None:
            top_level.setdefault("num_predict", limit)
        return value | {"options": top_level | (options or {})} if top_level else value


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """As in chat completions. Ollama itself has no such field; its clients send it."""


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    """Take the prompt as it is, without the chat template."""
    suffix: Text | None = None
    """Text after the answer, which fills the gap; for models with marks for it."""
    template: refused("only the model's own template is rendered") = None  # type: ignore[valid-type]
    context: Context | None = None
    """Tokens of an earlier prompt and its answer, placed before the prompt."""

    @model_validator(mode="after")
    def _check_raw_prompt(self) -> Self:
        for name in ("raw", "suffix"):
            if getattr(self, name) and self.context:
                raise ValueError(f"{name}: not supported beside context; leave one of them out")
        return self


class _Embedded(Body):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    options: OllamaOptions | None = None
    """Ignored: nothing is sampled."""
    keep_alive: float | str | None = None
    """How long the model stays loaded afterwards; a single model always does."""


class OllamaEmbedRequest(_Embedded):
    """Body of POST /api/embed."""

    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)] | None = None
    truncate: bool | None = None
    """Cut inputs that are longer than the context, which is the default; false refuses them."""
    dimensions: Annotated[int, Field(ge=0)] | None = None
    """Elements of each vector; 0: all."""


class OllamaEmbeddingsRequest(_Embedded):
    """Body of POST /api/embeddings, the older route."""

    prompt: Text | None = None


class OllamaPullRequest(Body):
    """Body of POST /api/pull."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of `model`."""
    stream: bool | None = None
    """Streams by default."""


class OllamaShowRequest(Body):
    """Body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of `model`."""
