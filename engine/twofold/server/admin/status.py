"""GET /, /health, /metrics, /v1/models and the route for the load tester's samples."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from twofold import __version__
from twofold.api.addresses import is_loopback
from twofold.server.admin.answer_schemas import Health
from twofold.server.admin.gauges import series
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.observe.metrics import exposition
from twofold.server.bridge.requests.request_body import read_body
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers, text_answer
from twofold.telemetry.sink import parse_load_samples


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/health",
        responses=answers(Health) | answers(Health, status=503, description="Loading, draining or failed"),
    )
    @routes.head("/health", include_in_schema=False)
    async def health() -> Response:
        return JSONResponse(_health(state), status_code=200 if state.serving_phase == "ready" else 503)

    @routes.get("/metrics", response_class=PlainTextResponse, responses=text_answer("text/plain"))
    async def metrics() -> Response:
        return PlainTextResponse(
            exposition(series(state)), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    _add_load_samples(routes, state)
    return routes


def _add_load_samples(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/internal/load_samples", include_in_schema=False)
    async def load_samples(request: Request) -> dict[str, int]:
        _require_loopback(request)
        if state.sink is None:
            raise ApiError(
                404, "no telemetry database is configured (--telemetry-url), so samples cannot be stored"
            )
        raw = await read_body(request, state.config.max_body_bytes)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise ApiError(400, "the request body is not valid JSON", code="invalid_json") from None
        rows = parse_load_samples(body)
        used_last = next((model.sink for model in state.loaded_models if model.sink is not None), state.sink)
        used_last.load_samples(rows)
        return {"accepted": len(rows)}


def _health(state: ServerState) -> dict[str, Any]:
    body: dict[str, Any] = {
        "status": state.serving_phase,
        "version": __version__,
        "uptime_s": round(time.time() - state.started_s, 3),
        "telemetry": _telemetry(state),
    }
    if state.manager is not None:
        return body | {"models": {model.name: _model_health(model) for model in state.models}}
    model = state.default
    engine = model.loaded_engine
    if engine is None:
        return body
    return body | {"model": model.name} | _engine_health(engine)


def _model_health(model: ServedModel) -> dict[str, Any]:
    engine = model.loaded_engine
    state_fields = {"state": model.state} | ({"reason": model.problem} if model.problem else {})
    return state_fields if engine is None else state_fields | _engine_health(engine)


def _engine_health(engine: ServingEngine) -> dict[str, Any]:
    info, stats, mapped, failure = engine.info, engine.stats(), engine.mapped_weights, engine.failure
    return {
        "max_context": engine.max_context,
        "accelerator": info.accelerator,
        "accelerator_reason": info.accelerator_reason,
        "failure": None if failure is None else dataclasses.asdict(failure),
        "emulated": info.accelerator.startswith("emulated"),
        "clock": info.clock,
        "policy": info.policy if info.num_slots else None,
        "num_slots": info.num_slots,
        "output_changes": list(info.output_changes),
        "asleep": engine.control.asleep,
        "mapped_weights": None if mapped is None else dataclasses.asdict(mapped),
        "queue": {"running": stats.num_running, "waiting": stats.num_waiting},
    }


def _telemetry(state: ServerState) -> dict[str, Any]:
    """Recorder state and lost events. A broken database costs events, not readiness; its error is only in the log,
    because it names files."""
    stats = state.sink.stats() if state.sink is not None else None
    if stats is None:
        return {"state": "off"}
    return {
        "state": "recording" if stats.last_error is None else "failing",
        "level": stats.level,
        "events_written": stats.num_written,
        "events_queued": stats.num_queued,
        "events_lost": dict(stats.dropped),
    }


def _require_loopback(request: Request) -> None:
    """Check for a loopback client: the load tester runs on the same machine; for others this path does not exist."""
    loopback = request.client is not None and is_loopback(request.client.host)
    # A browser sends cross-site JSON only after a preflight, which fails here because CORS is off.
    is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if not loopback or not is_json:
        raise ApiError(404, f"there is nothing at {request.url.path!r}; the API is under /v1")
