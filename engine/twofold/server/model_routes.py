"""GET /v1/models, and llama.cpp's routes that load and unload a model."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import APIRouter, Request

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body
from twofold.server.http.bodies import Body, ModelName
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers, body_of
from twofold.server.ollama.answer_schemas import OllamaModel
from twofold.server.ollama.model_card import ollama_cards
from twofold.server.openai.answer_schemas import Model
from twofold.server.openai.model_card import listed_models, openai_card

_DONE: Final = {"success": True}


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: Literal[False]
    models: list[OllamaModel]


class ModelChanged(TypedDict):
    success: Literal[True]


class ModelBody(Body):
    """Body of POST /models/load and /models/unload."""

    model: ModelName


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get("/models", include_in_schema=False)
    @routes.get("/v1/models", response_model=None, responses=answers(ModelList))
    async def models() -> dict[str, Any]:
        listed = listed_models(state)
        return {
            "object": "list",
            "data": [openai_card(model, name) for model, name in listed],
            # Anthropic's fields for a list of a single page.
            "first_id": listed[0][1],
            "last_id": listed[-1][1],
            "has_more": False,
            "models": await ollama_cards(state),
        }

    @routes.get("/v1/models/{name:path}", response_model=None, responses=answers(Model))
    async def model(name: str) -> dict[str, Any]:
        listed_models(state)  # refuses while there is none
        return openai_card(state.find(name), name)

    @routes.post(
        "/models/load",
        response_model=None,
        openapi_extra=body_of(ModelBody),
        responses=answers(ModelChanged),
    )
    async def load(request: Request) -> dict[str, bool]:
        """Begin to load a model; GET /v1/models tells when it is loaded."""
        model = state.find((await parse_body(request, ModelBody, state)).model)
        if state.manager is not None:
            state.manager.load(model)
        return _DONE

    @routes.post(
        "/models/unload",
        response_model=None,
        openapi_extra=body_of(ModelBody),
        responses=answers(ModelChanged),
    )
    async def unload(request: Request) -> dict[str, bool]:
        """Unload a model once its running requests have finished; the next request loads it again."""
        model = state.find((await parse_body(request, ModelBody, state)).model)
        if state.manager is None:
            message = "this server has one model, which stays loaded; `twofold serve A B` loads on demand"
            raise ApiError(400, message, code="one_model")
        state.manager.unload(model)
        return _DONE

    return routes
