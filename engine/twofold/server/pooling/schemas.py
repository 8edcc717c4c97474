"""Bodies of /v1/embeddings, /v1/rerank and /score, in the forms of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from twofold.server.http.bodies import Body, ModelName, refused
from twofold.server.openai.messages import Text
from twofold.server.openai.schemas import TokenId, TruncatedTo

MAX_INPUTS: Final = 2048
"""Most inputs of one request, as at OpenAI."""


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("the input is empty; give at least one character")
    return value


InputText = Annotated[Text, AfterValidator(_not_empty)]
InputTexts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
InputTokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
InputTokenLists = Annotated[list[InputTokens], Field(max_length=MAX_INPUTS, fail_fast=True)]
Input = str | list[int]
"""One input: a text, or its token ids."""
_NoMessages = refused("a conversation has no embedding here; send input")
_OnlyFloats = refused("vectors are 32-bit floats in the machine's order; leave it out")


def _kind_of_input(value: object) -> str:
    """Tag of the intended kind, so that pydantic reports only its errors."""
    if not isinstance(value, list):
        return "a-text"
    if not value or isinstance(value[0], str):
        return "some-texts"
    return "some-token-ids" if isinstance(value[0], list) else "token-ids"


class PooledFields(Body):
    """Fields of all these routes."""

    model: ModelName | None = None
    truncate_prompt_tokens: TruncatedTo | None = None
    """Most tokens of each input; None: an input that is too long is refused."""
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class EmbeddingRequest(PooledFields):
    """Body of POST /v1/embeddings: a text, its token ids, or a list of either."""

    input: Annotated[
        Annotated[InputText, Tag("a-text")]
        | Annotated[InputTokens, Tag("token-ids")]
        | Annotated[InputTexts, Tag("some-texts")]
        | Annotated[InputTokenLists, Tag("some-token-ids")],
        Discriminator(_kind_of_input),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=256)] | None = None
    """Name of a text of config_sentence_transformers.json that is put before each input."""
    messages: _NoMessages = None  # type: ignore[valid-type]
    embed_dtype: _OnlyFloats = None  # type: ignore[valid-type]

    @property
    def inputs(self) -> list[Input]:
        """The inputs in the request's order."""
        several = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return cast(list[Input], self.input if several else [self.input])


class Document(BaseModel):
    """A document as an object, as Jina's and Cohere's clients send it."""

    text: InputText


class RerankRequest(PooledFields):
    """Body of POST /v1/rerank, /v2/rerank and /rerank."""

    query: InputText
    documents: Annotated[
        list[InputText | Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Most results; 0: all."""
    return_documents: bool | None = None
    """Repeat each document's text in its result, which is the default."""
    instruction: Annotated[str, Field(max_length=16_384)] | None = None
    """Instruction that defines relevance, for models that read it."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Cohere's: longer documents are cut."""

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(PooledFields):
    """Body of POST /score: one text and several, or as many pairs."""

    text_1: InputText | InputTexts
    text_2: InputText | InputTexts
    instruction: Annotated[str, Field(max_length=16_384)] | None = None

    @model_validator(mode="after")
    def _texts_pair(self) -> Self:
        first, second = (_listed(each) for each in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise ValueError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one text_1, or as many as text_2"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _listed(self.text_1), _listed(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _listed(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
