"""Request body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Final, Self, cast

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from twofold.server.http.errors import CONTEXT_LENGTH, too_long
from twofold.server.openai.fields import refusing
from twofold.server.openai.messages import Text
from twofold.server.openai.schemas import (
    MAX_CHOICES,
    MAX_INT64,
    Count,
    NumLogprobs,
    SamplingFields,
    TokenId,
    disagreement,
)

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of /v1/completions without max_tokens."""


def fits_the_context(ids: list[int], info: ValidationInfo) -> list[int]:
    """Refuse more tokens than the context of the request's model holds with an answer, unless the request truncates
    them."""
    context = info.context or {}
    limits, requested = context.get("limits", {}), info.data.get("model") or ""
    # A server of one model takes any name that it accepts as that model.
    own = limits.get(requested) or (limits.get("") if len(limits) == 1 else None)
    max_context, reason = own or (context.get("max_context"), "")
    is_cut = info.data.get("truncate_prompt_tokens") is not None
    if max_context is not None and len(ids) >= max_context and not is_cut:
        message = too_long(len(ids), max_context, reason)
        raise PydanticCustomError(CONTEXT_LENGTH, "{message}", {"message": message})
    return ids


# fail_fast: a body of 8 MB would otherwise collect 2.6 million errors.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), AfterValidator(fits_the_context)]


def _kind_of_prompt(value: object) -> str:
    """Tag of the intended kind, so that pydantic reports only its errors."""
    if not isinstance(value, list):
        return "a-text"
    if value and isinstance(value[0], str):
        return "some-texts"
    return "some-token-ids" if value and isinstance(value[0], list) else "token-ids"


def _not_empty(value: str, info: ValidationInfo) -> str:
    if not value and not info.data.get("suffix"):
        raise ValueError("the prompt is empty; give at least one character")
    return value


PromptText = Annotated[Text, AfterValidator(_not_empty)]
PromptTexts = Annotated[list[PromptText], Field(max_length=MAX_CHOICES, fail_fast=True)]
PromptTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_CHOICES, fail_fast=True)]


@refusing("completions")
class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions: a text, its token ids, or a list of either."""

    # Before the prompt, which may be empty beside it.
    suffix: Text | None = None
    """Text after the answer, which fills the gap between both."""
    prompt: Annotated[
        Annotated[PromptText, Tag("a-text")]
        | Annotated[TokenIds, Tag("token-ids")]
        | Annotated[PromptTexts, Tag("some-texts")]
        | Annotated[PromptTokenIds, Tag("some-token-ids")],
        Discriminator(_kind_of_prompt),
    ]
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = None
    echo: bool | None = None
    best_of: Annotated[Count, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of < self.num_choices:
            raise disagreement(
                "best_of",
                self.best_of,
                f"fewer than the {self.num_choices} choices of n; raise it, or leave it out",
            )
        if self.suffix and self.echo:
            raise disagreement(
                "echo", True, "the prompt of an answer between two texts has marks; leave echo out"
            )
        if self.stream and self.num_candidates > self.num_choices:
            raise disagreement(
                "best_of",
                self.best_of,
                "the best answers are known when all are complete, so more than n cannot be streamed; leave stream out",
            )
        wanted = self.num_candidates * len(self.prompts)
        if wanted > MAX_CHOICES:
            raise disagreement(
                "n" if self.best_of is None else "best_of",
                self.num_candidates,
                f"{len(self.prompts)} prompts with this many answers each are {wanted}, more than the "
                f"{MAX_CHOICES} that one request may ask for; send several requests",
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts in the request's order."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return cast(list[str] | list[list[int]], self.prompt if several else [self.prompt])

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def answer_limit(self) -> int | None:
        if self.max_tokens is None:
            return DEFAULT_COMPLETION_TOKENS
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return (
            self.prompt_logprobs if self.prompt_logprobs is not None else self.logprobs if self.echo else None
        )
