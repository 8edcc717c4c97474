"""The FastAPI application around one engine."""

from __future__ import annotations

import functools

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from twofold import __version__
from twofold.api.config import ServerConfig
from twofold.api.errors import TwofoldError
from twofold.api.types import SamplingParams
from twofold.server import model_routes
from twofold.server.admin import adapters, expert_recording, inspection, sglang_info, status
from twofold.server.admin import routes as admin
from twofold.server.anthropic import routes as anthropic_messages
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.middleware import RequestFrame
from twofold.server.http import errors as api_errors
from twofold.server.http import openapi
from twofold.server.http.errors import ApiError
from twofold.server.llama_cpp import infill
from twofold.server.ollama import creating as ollama_creating
from twofold.server.ollama import embeddings as ollama_embeddings
from twofold.server.ollama import routes as ollama
from twofold.server.openai import routes as completions
from twofold.server.openai import tokenization
from twofold.server.pooling import embeddings, rerank
from twofold.server.responses import routes as responses
from twofold.server.web import routes as web
from twofold.telemetry.sink import TelemetrySink


def create_app(
    engine: ServingEngine | None,
    config: ServerConfig,
    sink: TelemetrySink | None = None,
    *,
    sampling_defaults: SamplingParams | None = None,
) -> ASGIApp:
    """The application, ready to be served.

    Args:
        engine: a started engine; None while it loads (the API answers 503 until `state.ready` is called).
        sink: destination of load samples; None disables recording.
        sampling_defaults: sampling parameters of requests that set none; OpenAI's defaults if None.
    """
    state = ServerState(config, sink)
    if engine is not None:
        state.ready(engine, sampling_defaults)
    return app_of(state)


def app_of(state: ServerState) -> ASGIApp:
    """The application over an existing `ServerState`; the caller moves it through its phases."""
    app = FastAPI(
        title="Twofold",
        version=__version__,
        description="OpenAI-compatible API of a hybrid CPU+GPU engine for Mixture-of-Experts models.",
        # The documentation pages load scripts from other sites; /openapi.json has the same content.
        docs_url=None,
        redoc_url=None,
    )
    app.openapi = functools.partial(openapi.document, app)  # type: ignore[method-assign]
    app.include_router(status.router(state))
    app.include_router(model_routes.router(state))
    app.include_router(sglang_info.router(state))
    app.include_router(adapters.router(state))
    app.include_router(web.router(state))
    app.include_router(completions.router(state))
    app.include_router(responses.router(state))
    app.include_router(tokenization.router(state))
    app.include_router(inspection.router(state))
    app.include_router(embeddings.router(state))
    app.include_router(rerank.router(state))
    app.include_router(ollama.router(state))
    app.include_router(ollama_embeddings.router(state))
    app.include_router(infill.router(state))
    app.include_router(anthropic_messages.router(state))
    if state.config.admin_key:
        app.include_router(admin.router(state))
        app.include_router(expert_recording.router(state))
        app.include_router(adapters.admin_router(state))
        app.include_router(ollama_creating.admin_router(state))
    app.add_exception_handler(ApiError, api_errors.answer_api_error)
    app.add_exception_handler(TwofoldError, api_errors.answer_twofold_error)
    app.add_exception_handler(ClientDisconnect, api_errors.answer_disconnect)
    app.add_exception_handler(Exception, api_errors.answer_bug)
    app.add_exception_handler(HTTPException, api_errors.answer_http_exception)
    frame = RequestFrame(app, state)
    if not state.config.allowed_origins:
        return frame
    # Outermost, so that refusals are readable by those pages too.
    return CORSMiddleware(
        frame,
        allow_origins=state.config.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "x-twofold-accelerator", "x-twofold-clock", "retry-after"),
    )
