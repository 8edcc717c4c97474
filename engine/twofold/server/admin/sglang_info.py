"""GET /model_info and /server_info: SGLang's routes, which its router asks for a worker's model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from twofold import __version__
from twofold.server.admin.answer_schemas import ModelInfo, ServerInfo
from twofold.server.bridge.models.state import ServerState
from twofold.server.http.openapi import answers
from twofold.weights.gguf_file import model_name


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get("/get_model_info", response_model=None, responses=answers(ModelInfo))
    @routes.get("/model_info", response_model=None, responses=answers(ModelInfo))
    async def model_info(request: Request) -> dict[str, Any]:
        """`?model=` chooses among several models; else it is the one used last."""
        return _names(state, request) | {"is_generation": True}

    @routes.get("/get_server_info", response_model=None, responses=answers(ServerInfo))
    @routes.get("/server_info", response_model=None, responses=answers(ServerInfo))
    async def server_info(request: Request) -> dict[str, Any]:
        """`?model=` chooses among several models; else it is the one used last."""
        engine = state.queried(request).engine_while_draining
        return _names(state, request) | {
            "version": f"twofold-{__version__}",
            "tp_size": 1,
            "dp_size": 1,
            "max_running_requests": engine.config.max_num_seqs,
            "context_length": engine.max_context,
        }

    return routes


def _names(state: ServerState, request: Request) -> dict[str, Any]:
    model = state.queried(request)
    # The file name only: paths stay private.
    name = model_name(model.engine_while_draining.info.model)
    return {"model_path": name, "tokenizer_path": name, "served_model_name": model.name}
