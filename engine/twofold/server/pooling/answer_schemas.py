"""Schemas of the answers about embeddings and reranking, for /openapi.json. Not used when answers are made."""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict


class PooledUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingOfInput(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingOfInput]
    model: str
    usage: PooledUsage


class RerankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RerankedDocument]


class Reranked(TypedDict):
    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PooledUsage
