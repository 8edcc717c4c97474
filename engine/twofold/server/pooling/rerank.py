"""POST /v1/rerank, /v2/rerank, /rerank, and vLLM's /score.

A model with classifier tokens, or with a classifier of its own, reads query and document together. The score is the
probability of the second token, or relevant label, against the other; of a single label the logit's sigmoid, as in
vLLM. Any other model gives the cosine of the two embeddings.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.api.errors import RequestError
from twofold.api.pooling import Pooling
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body
from twofold.server.http.openapi import answers, body_of
from twofold.server.pooling.answer_schemas import Reranked, Scores
from twofold.server.pooling.answers import F32, answer_pooled, embedding_of
from twofold.server.pooling.embeddings import places, usage
from twofold.server.pooling.inputs import InputTokens
from twofold.server.pooling.schemas import RerankRequest, ScoreRequest

Pairs = Sequence[tuple[str, str]]


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    rerank_paths, score_paths = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/score", "/v1/score")
    state.computing_paths |= {*rerank_paths, *score_paths}

    async def rerank(request: Request) -> Response:
        body = await parse_body(request, RerankRequest, state)
        async with state.using(body.model) as model:
            return await _rerank(request, model, body)

    async def score(request: Request) -> Response:
        body = await parse_body(request, ScoreRequest, state)
        async with state.using(body.model) as model:
            return await _score(request, model, body)

    for path in rerank_paths:
        routes.post(path, openapi_extra=body_of(RerankRequest), responses=answers(Reranked))(rerank)
    for path in score_paths:
        routes.post(path, openapi_extra=body_of(ScoreRequest), responses=answers(Scores))(score)
    return routes


async def _rerank(request: Request, model: ServedModel, body: RerankRequest) -> Response:
    limit = body.max_tokens_per_doc

    def pairs(tokens: InputTokens) -> Pairs:
        return [(body.query, tokens.cut(text, limit)) for text in body.texts]

    def write(scores: list[float], num_tokens: int) -> dict[str, object]:
        return _reranked(model, body, scores, num_tokens)

    return await _answer_pairs(request, model, body, pairs, write, ("query", "documents"))


async def _score(request: Request, model: ServedModel, body: ScoreRequest) -> Response:
    def write(scores: list[float], num_tokens: int) -> dict[str, object]:
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [{"index": n, "object": "score", "score": each} for n, each in enumerate(scores)],
            "usage": usage(num_tokens),
        }

    return await _answer_pairs(request, model, body, lambda tokens: body.pairs, write, ("text_1", "text_2"))


def _reranked(
    model: ServedModel, body: RerankRequest, scores: list[float], num_tokens: int
) -> dict[str, object]:
    """The best documents first; equal ones in the request's order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, object]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents is not False:
        for result, index in zip(results, order, strict=True):
            result["document"] = {"text": body.texts[index]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model.name,
        "usage": usage(num_tokens),
        "results": results,
    }


async def _answer_pairs(
    request: Request,
    served: ServedModel,
    body: RerankRequest | ScoreRequest,
    pairs: Callable[[InputTokens], Pairs],
    write: Callable[[list[float], int], dict[str, object]],
    fields: tuple[str, str],
) -> Response:
    """Score pairs of texts from these two fields of the request."""
    model = served.engine.pooling
    rows: list[tuple[int, int]] = []
    """Indices of the two vectors of each pair, where there is no classifier."""

    def classify(tokens: InputTokens) -> dict[str, tuple[int, ...]]:
        found = places(fields[1], list(pairs(tokens)))
        return {
            where: tokens.pair(query, document, where, prompt=model.pair_prompt, instruction=body.instruction)
            for where, (query, document) in found.items()
        }

    def embed(tokens: InputTokens) -> dict[str, tuple[int, ...]]:
        both = pairs(tokens)
        queries = {query: n for n, query in enumerate(dict.fromkeys(query for query, _ in both))}
        rows.extend((queries[query], len(queries) + n) for n, (query, _) in enumerate(both))
        texts = places(fields[0], list(queries)) | places(fields[1], [text for _, text in both])
        return {where: tokens.encode(text, where) for where, text in texts.items()}

    def written(vectors: list[F32], num_tokens: int) -> bytes:
        if not pooling.tokens:
            scores = [float(vectors[a].astype("f8") @ vectors[b].astype("f8")) for a, b in rows]
        else:
            scores = [_probability(*map(float, vector)) for vector in vectors]
        return json.dumps(write(scores, num_tokens), ensure_ascii=False).encode(errors="replace")

    pooling = _pooling_of_pairs(served)
    work = classify if pooling.tokens else embed
    return await answer_pooled(request, served, body, pooling, work, written, endpoint="rerank")


def _pooling_of_pairs(served: ServedModel) -> Pooling:
    """The logits of the model's classifier or of its two tokens; a vector if it has neither. Raises RequestError."""
    model = served.engine.pooling
    if model.num_labels > 2:
        raise RequestError(
            f"the classifier of this model has {model.num_labels} labels; ranking takes one or two",
            param="model",
        )
    if model.labels or model.classifier is not None:
        return Pooling(tokens=model.labels or _token_ids(served, model.classifier or ()))
    return embedding_of(model, normalise=True)


def _token_ids(model: ServedModel, texts: Sequence[str]) -> tuple[int, ...]:
    ids = []
    for text in texts:
        found = model.engine.tokenizer.token_id(text)
        if found is None:
            raise RequestError(
                f"the classifier's token {text!r} is not in the vocabulary; give others as classifier_from_token of "
                "--pooler-config",
                param="model",
            )
        ids.append(found)
    return tuple(ids)


def _probability(*logits: float) -> float:
    """The last one's share in the softmax of two logits; of a single one its sigmoid."""
    no, yes = logits if len(logits) == 2 else (0.0, *logits)
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
