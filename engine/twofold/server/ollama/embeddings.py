"""Ollama's /api/embed and /api/embeddings, as requests of /v1/embeddings."""

from __future__ import annotations

import json
import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body, translated
from twofold.server.http.arrival import times_of
from twofold.server.http.openapi import answers, body_of
from twofold.server.ollama.answer_schemas import OllamaEmbedded, OllamaEmbedding
from twofold.server.ollama.keep_alive import using_model
from twofold.server.ollama.schemas import OllamaEmbeddingsRequest, OllamaEmbedRequest
from twofold.server.pooling.answers import F32, Tokenise, answer_pooled, embedding_of
from twofold.server.pooling.embeddings import places
from twofold.server.pooling.inputs import InputTokens
from twofold.server.pooling.schemas import EmbeddingRequest


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/api")
    state.computing_paths |= {"/api/embed", "/api/embeddings"}

    @routes.post("/embed", openapi_extra=body_of(OllamaEmbedRequest), responses=answers(OllamaEmbedded))
    async def embed(request: Request) -> Response:
        body = await parse_body(request, OllamaEmbedRequest, state)
        async with using_model(state, body) as model:
            return await _embed(request, model, body)

    @routes.post(
        "/embeddings", openapi_extra=body_of(OllamaEmbeddingsRequest), responses=answers(OllamaEmbedding)
    )
    async def embeddings(request: Request) -> Response:
        body = await parse_body(request, OllamaEmbeddingsRequest, state)
        async with using_model(state, body) as model:
            return await _embeddings(request, model, body)

    return routes


async def _embed(request: Request, model: ServedModel, body: OllamaEmbedRequest) -> Response:
    def write(vectors: list[F32], num_tokens: int) -> bytes:
        nanoseconds = int((time.perf_counter() - times_of(request.scope).received) * 1e9)
        answer = {
            "model": body.model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": nanoseconds,
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
        return json.dumps(answer).encode()

    if not body.input:  # clients load a model so
        return Response(write([], 0), media_type="application/json")
    fields = {"input": body.input, "truncate_prompt_tokens": None if body.truncate is False else -1}
    requested = translated(EmbeddingRequest, fields | {"dimensions": body.dimensions or None}, model)
    pooling = embedding_of(model.engine.pooling, dimensions=requested.dimensions, normalise=True)
    return await answer_pooled(
        request, model, requested, pooling, _tokeniser(requested), write, endpoint="embeddings"
    )


async def _embeddings(request: Request, model: ServedModel, body: OllamaEmbeddingsRequest) -> Response:
    if not body.prompt:
        return JSONResponse({"embedding": []})
    fields = {"input": body.prompt, "truncate_prompt_tokens": -1}
    requested = translated(EmbeddingRequest, fields, model)

    def write(vectors: list[F32], num_tokens: int) -> bytes:
        return json.dumps({"embedding": vectors[0].tolist()}).encode()

    # Ollama normalises the newer route's vectors alone.
    pooling = embedding_of(model.engine.pooling, normalise=False)
    return await answer_pooled(
        request, model, requested, pooling, _tokeniser(requested), write, endpoint="embeddings"
    )


def _tokeniser(requested: EmbeddingRequest) -> Tokenise:
    def tokenise(tokens: InputTokens) -> dict[str, tuple[int, ...]]:
        return {
            where: tokens.encode(text, where) for where, text in places("input", requested.inputs).items()
        }

    return tokenise
