"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body
from twofold.server.http.errors import wrong_field
from twofold.server.http.openapi import answers, body_of
from twofold.server.pooling.answer_schemas import Embeddings
from twofold.server.pooling.answers import F32, answer_pooled, embedding_of
from twofold.server.pooling.inputs import InputTokens
from twofold.server.pooling.schemas import EmbeddingRequest, Input


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    state.computing_paths |= {"/v1/embeddings"}

    @routes.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest), responses=answers(Embeddings))
    async def embeddings(request: Request) -> Response:
        body = await parse_body(request, EmbeddingRequest, state)
        async with state.using(body.model) as model:
            return await _answer(request, model, body)

    return routes


async def _answer(request: Request, model: ServedModel, body: EmbeddingRequest) -> Response:
    before = _prompt(model, body.prompt_name)
    adds = body.add_special_tokens is not False

    def tokenise(tokens: InputTokens) -> dict[str, tuple[int, ...]]:
        return {
            where: tokens.encode(_after(before, text, where), where, add_special_tokens=adds)
            for where, text in places("input", body.inputs).items()
        }

    def write(vectors: list[F32], num_tokens: int) -> bytes:
        return json.dumps(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _encoded(vector, body.encoding_format),
                    }
                    for index, vector in enumerate(vectors)
                ],
                "model": model.name,
                "usage": usage(num_tokens),
            }
        ).encode()

    pooling = embedding_of(model.engine.pooling, dimensions=body.dimensions, normalise=body.normalize)
    return await answer_pooled(request, model, body, pooling, tokenise, write, endpoint="embeddings")


def places(field: str, inputs: list[Any]) -> dict[str, Any]:
    """Inputs by their place in the request, such as input[3]; a single one is the field itself."""
    return {field if len(inputs) == 1 else f"{field}[{n}]": each for n, each in enumerate(inputs)}


def usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _prompt(model: ServedModel, name: str | None) -> str:
    prompts = model.engine.pooling.prompts
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise wrong_field("prompt_name", f"{name!r} was given; the model's files have {known}")
    return prompts[name]


def _after(prompt: str, text: Input, where: str) -> Input:
    if not prompt or isinstance(text, str):
        return prompt + text if isinstance(text, str) else text
    raise wrong_field(where, "token ids were given beside prompt_name; send texts, or leave prompt_name out")


def _encoded(vector: F32, encoding: str | None) -> list[float] | str:
    """Numbers, or base64 of little-endian 32-bit floats."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
