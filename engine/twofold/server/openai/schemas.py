"""Request body of POST /v1/chat/completions, and the fields it shares with /v1/completions, validated and bounded.

`fields.py` lists all fields and how fields missing here are handled.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from twofold.api.sampling_ranges import BIAS_RANGE, LOGPROBS_RANGE, SAMPLING_RANGES, Range
from twofold.api.types import SamplingParams
from twofold.server.http.bodies import Body, LoraScales, ModelName
from twofold.server.openai.chat_tools import Choice, Tool, as_function, tool_name
from twofold.server.openai.fields import refusing
from twofold.server.openai.messages import MAX_MESSAGES, Message
from twofold.server.openai.structured_outputs import StructuredFields
from twofold.server.openai.template_fields import TemplateFields

N = TypeVar("N", int, float)

MAX_STOPS: Final = 1024
"""Most stop texts. Chat front ends send one per speaker and marker; OpenAI's own limit is four."""
MAX_STOP_CHARS: Final = 1024
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1
MAX_BIASED: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_STOP_TOKENS: Final = 1024
MAX_CHOICES: Final = 128
"""Most answers of one request, over all its prompts."""
MAX_TOOLS: Final = 512


def disagreement(field: str, value: object, message: str) -> ValidationError:
    """Error for contradictory fields. Errors raised by a model validator name no field otherwise."""
    kind = PydanticCustomError("fields_disagree", "{message}", {"message": message})
    detail = InitErrorDetails(type=kind, loc=(field,), input=value)
    return ValidationError.from_exception_data("request", [detail])


def _texts_without_empty(value: object) -> object:
    """One text or many as a list. An empty text, which clients send for none, would end every answer at once."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _no_limit(value: object) -> object:
    """llama.cpp's clients send -1 for an answer without a limit."""
    return None if value == -1 and not isinstance(value, bool) else value


def _whole_numbers_only(value: object) -> object:
    """Reject JSON's true and false, which Python accepts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not true or false")
    return value


def _within(allowed: Range) -> Any:
    """Field constraint for a range."""
    if allowed.low_allowed:
        return Field(ge=allowed.low, le=allowed.high)
    return Field(gt=allowed.low, le=allowed.high)


def _few_biases(value: object) -> object:
    """Check the count before the entries: a dictionary collects the errors of all its entries, maybe millions."""
    if isinstance(value, dict) and len(value) > MAX_BIASED:
        raise ValueError(f"has {len(value)} tokens; at most {MAX_BIASED} are taken")
    return value


def _length_or_all(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("give a number of tokens, or -1 for as many as the context holds")
    return value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None,
    BeforeValidator(_texts_without_empty),
]
BadWords = Annotated[
    Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None,
    BeforeValidator(_texts_without_empty),
]
AnswerLimit = Annotated[Annotated[int, Field(ge=1, le=MAX_INT64)] | None, BeforeValidator(_no_limit)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, BeforeValidator(_whole_numbers_only)]
TruncatedTo = Annotated[Count, Field(le=MAX_INT64), AfterValidator(_length_or_all)]
"""Most tokens of a prompt; -1: as many as the context holds beside the answer."""
NumLogprobs = Annotated[Count, _within(LOGPROBS_RANGE)]
Bias = Annotated[float, _within(BIAS_RANGE)]


class PassedSampling(Body):
    """Sampling fields of other APIs. The chat request that they are passed on to validates them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None

    def passed_on(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PassedSampling.model_fields}


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PredictedPart(BaseModel):
    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SamplingFields(Body, StructuredFields):
    """Fields of both endpoints: model, sampling, answer format."""

    model: ModelName | None = None
    lora: LoraScales | None = None
    lora_path: ModelName | None = None
    temperature: Annotated[float, _within(SAMPLING_RANGES["temperature"])] | None = None
    top_p: Annotated[float, _within(SAMPLING_RANGES["top_p"])] | None = None
    # vLLM's clients send -1 for what is 0 here.
    top_k: Annotated[int, _within(SAMPLING_RANGES["top_k"]._replace(low=-1))] | None = None
    min_p: Annotated[float, _within(SAMPLING_RANGES["min_p"])] | None = None
    presence_penalty: Annotated[float, _within(SAMPLING_RANGES["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, _within(SAMPLING_RANGES["frequency_penalty"])] | None = None
    repetition_penalty: Annotated[float, _within(SAMPLING_RANGES["repetition_penalty"])] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=2 * MAX_INT64 + 1)] | None = None
    max_tokens: AnswerLimit = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_few_biases)] = None
    bad_words: BadWords = None
    n: Annotated[Count, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    truncate_prompt_tokens: TruncatedTo | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_speed: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", self.stream, "only allowed together with stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise disagreement(
                "prompt_logprobs", self.prompt_logprobs, "does not come in a stream; leave stream out"
            )
        for second in self.constraints[1:]:
            raise disagreement(
                second.field, None, "is a second constraint on the answer; send only one such field"
            )
        limit = self.answer_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise disagreement(
                "min_tokens",
                self.min_tokens,
                f"more than the {limit} tokens the answer may have; raise max_tokens",
            )
        return self

    @property
    def answer_limit(self) -> int | None:
        """Most tokens of the answer; None: limited by the context only."""
        return self.max_tokens

    def prompt_limit(self, max_context: int) -> int | None:
        """Most tokens of the prompt that are used, the last ones; None: a prompt that is too long is refused."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        answer = self.answer_limit or 1
        # Many clients send the context's whole length as max_tokens.
        return max_context - (answer if answer < max_context else 1)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Answers generated per prompt; `num_choices` of them are returned."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to return beside each token's log probability; None: no log probabilities."""
        raise AssertionError("each endpoint names it in its own way")

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, defaults: SamplingParams, room: int) -> SamplingParams:
        """The engine's sampling parameters, except `bad_words`, which must be tokenised first.

        `room` is the number of tokens that the context has left for the answer. A higher limit is cut to it: many
        clients send the context's whole length as max_tokens.
        """
        limit = self.answer_limit
        max_tokens = room if limit is None else min(limit, room)
        seed = _or(self.seed, -1 if defaults.seed is None else defaults.seed)
        ranks = self.num_candidates > self.num_choices
        same = {name: _or(getattr(self, name), getattr(defaults, name)) for name in SAMPLING_RANGES}
        return SamplingParams(
            **same | {"top_k": max(0, same["top_k"])},
            # numpy's generators take no negative seed; the low 63 bits keep different seeds different.
            seed=None if self.seed is None and defaults.seed is None else seed & MAX_INT64,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
            min_tokens=min(self.min_tokens or 0, max_tokens),
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            logprobs=0 if self.num_logprobs is None and ranks else self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )


@refusing("chat")
class ChatRequest(SamplingFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: AnswerLimit = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_token_budget: Annotated[Count, Field(ge=-1, le=MAX_INT64)] | None = None
    prediction: Prediction | None = None

    @field_validator("tool_choice")
    @classmethod
    def _is_a_choice(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        Choice.of(value)
        return value

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise disagreement(
                "top_logprobs", self.top_logprobs, "needs logprobs: true; send it, or leave both out"
            )
        names = {tool_name(tool) for tool in self.tools or ()}
        choice = self.choice
        unknown = ({choice.name} if choice.name is not None else choice.allowed or frozenset()) - names
        if unknown or (choice.mode == "required" and not self.offered_tools):
            wanted = repr(min(unknown)[:256]) if unknown else "any"
            raise disagreement(
                "tool_choice",
                self.tool_choice,
                f"names or forces a tool, but tools does not contain {wanted}; add it to tools",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise disagreement(
                "continue_final_message",
                True,
                "add_generation_prompt cannot be true as well: the answer either continues the last message or "
                "begins a new one; send one of them",
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)

    @property
    def hides_reasoning(self) -> bool:
        """Whether the thinking is left out of the answer."""
        return self.include_reasoning is False or bool(self.reasoning and self.reasoning.exclude)

    @property
    def thinking_budget(self) -> int | None:
        """Tokens after which the thinking is ended; None: no budget of the request's."""
        if self.thinking_token_budget is not None or self.reasoning is None:
            return self.thinking_token_budget
        return self.reasoning.max_tokens

    @property
    def choice(self) -> Choice:
        return Choice.of(self.tool_choice)

    @property
    def forced_tool(self) -> str | None:
        """The name of the only tool that may be called."""
        return self.choice.name

    @property
    def forces_a_call(self) -> bool:
        return self.choice.mode == "required"

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as functions."""
        return [as_function(tool) for tool in self._allowed_tools]

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the offered tools of type "custom"."""
        return frozenset(tool_name(tool) for tool in self._allowed_tools if tool["type"] == "custom")

    @property
    def _allowed_tools(self) -> list[dict[str, Any]]:
        choice, tools = self.choice, self.tools or []
        if choice.mode == "none":
            return []
        return (
            tools if choice.allowed is None else [tool for tool in tools if tool_name(tool) in choice.allowed]
        )

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
