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
from twofold.api.types import EngineStats, RunInfo
from twofold.server.admin.answer_schemas import Health, ModelList
from twofold.server.admin.speculation_metrics import speculation_gauges
from twofold.server.bridge.metrics import Gauge, Histogram, label_text, step_tokens
from twofold.server.bridge.protocol import ServingEngine
from twofold.server.bridge.request_body import read_body
from twofold.server.bridge.state import ServerState
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers, text_answer
from twofold.server.ollama.model_card import ollama_card
from twofold.server.openai.answer_schemas import Model
from twofold.server.openai.model_card import listed_names, openai_card
from twofold.telemetry.sink import parse_load_samples


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/health",
        responses=answers(Health) | answers(Health, status=503, description="Loading or draining"),
    )
    @routes.head("/health", include_in_schema=False)
    async def health() -> Response:
        return JSONResponse(_health(state), status_code=200 if state.phase == "ready" else 503)

    @routes.get("/metrics", response_class=PlainTextResponse, responses=text_answer("text/plain"))
    async def metrics() -> Response:
        text = state.metrics.text(
            state.model_name, _engine_gauges(state) + _telemetry_gauges(state), _engine_histograms(state)
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/v1/models", response_model=None, responses=answers(ModelList))
    async def models() -> dict[str, Any]:
        names = listed_names(state)
        cards = [ollama_card(state, name) for name in names]
        return {
            "object": "list",
            "data": [openai_card(state, name) for name in names],
            # Anthropic's fields for a list of a single page.
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,
            "models": cards,
        }

    @routes.get("/v1/models/{name:path}", response_model=None, responses=answers(Model))
    async def model(name: str) -> dict[str, Any]:
        served = openai_card(state, name)
        state.check_model(name)
        return served

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
        state.sink.load_samples(rows)
        return {"accepted": len(rows)}


def _health(state: ServerState) -> dict[str, Any]:
    body: dict[str, Any] = {
        "status": state.phase,
        "version": __version__,
        "uptime_s": round(time.time() - state.started_s, 3),
        "telemetry": _telemetry(state),
    }
    engine = state.loaded_engine
    if engine is None:
        return body
    info, stats, mapped = engine.info, engine.stats(), engine.mapped_weights
    return body | {
        "model": state.model_name,
        "max_context": engine.max_context,
        "accelerator": info.accelerator,
        "accelerator_reason": info.accelerator_reason,
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
        "events_written": stats.num_written,
        "events_queued": stats.num_queued,
        "events_lost": dict(stats.dropped),
    }


def _telemetry_gauges(state: ServerState) -> list[Gauge]:
    stats = state.sink.stats() if state.sink is not None else None
    if stats is None:
        return []
    is_recording = float(stats.last_error is None)
    lost: dict[str, float] = {label_text(place=place): count for place, count in stats.dropped.items()}
    return [
        (
            "twofold:telemetry_recording",
            "1 while the telemetry database can be written, else 0.",
            is_recording,
        ),
        ("twofold:telemetry_events_written_total", "Events in the database.", stats.num_written),
        ("twofold:telemetry_events_queued", "Events that wait to be written.", stats.num_queued),
        ("twofold:telemetry_events_lost_total", "Events lost: in native rings, queue or database.", lost),
    ]


def _engine_gauges(state: ServerState) -> list[Gauge]:
    engine = state.loaded_engine
    if engine is None:
        return []
    stats = engine.stats()
    used = 1 - stats.num_free_pages / max(stats.num_pages, 1)
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    rows: list[Gauge] = [
        ("vllm:num_requests_running", "Running requests.", stats.num_running),
        ("vllm:num_requests_waiting", "Waiting requests.", stats.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache's pages in use by running requests, 0 to 1.",
            used,
        ),
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", queries),
        ("vllm:prefix_cache_hits_total", "Prefix-cache hits, tokens.", hits),
        ("vllm:num_preemptions_total", "Preemptions.", stats.num_preemptions),
        (
            "vllm:cache_config_info",
            "Configuration of the KV cache; always 1.",
            _cache_config(engine, stats.num_pages),
        ),
    ]
    if stats.num_records:
        used = 1 - stats.num_free_records / stats.num_records
        rows.append(("twofold:records_usage_perc", "Share of the sequences' records in use, 0 to 1.", used))
    return rows + speculation_gauges(stats) + _expert_gauges(engine.info, stats)


def _expert_gauges(info: RunInfo, stats: EngineStats) -> list[Gauge]:
    placed = stats.placement
    rows: list[Gauge] = [
        ("twofold:expert_cpu_misses_total", "Routed experts that the CPU computed.", placed.cpu_misses)
    ]
    if info.output_changes:
        deferred = "Routed experts deferred to the next MoE layer (--num-deferred-experts)."
        rows.append(("twofold:expert_deferred_total", deferred, placed.deferred))
    if stats.dynamic_update:
        outcomes = {label_text(reason=reason): float(n) for reason, n in stats.dynamic_update.items()}
        told = "Steps with prompt tokens by outcome of the dynamic expert update."
        rows.append(("twofold:dynamic_update_total", told, outcomes))
    if not info.num_slots:  # no slots: zeros would look like a hit rate
        return rows
    hit_rate = placed.hits / max(placed.hits + placed.cpu_misses + placed.fetched, 1)
    return [
        *rows,
        ("twofold:expert_hits_total", "Routed experts that were in VRAM.", placed.hits),
        (
            "twofold:expert_fetched_total",
            "Routed experts uploaded for the step that needed them.",
            placed.fetched,
        ),
        ("twofold:expert_uploads_total", "Experts copied from host memory to VRAM.", placed.uploads),
        ("twofold:expert_evictions_total", "Experts evicted from their slot.", placed.evictions),
        (
            "twofold:expert_hit_rate",
            "Share of routed experts that were in VRAM since the start, 0 to 1.",
            hit_rate,
        ),
        ("twofold:h2d_bytes_total", "Bytes of experts copied to VRAM.", placed.h2d_bytes),
    ]


def _engine_histograms(state: ServerState) -> list[Histogram]:
    engine = state.loaded_engine
    return [] if engine is None else [step_tokens(engine.stats().step_tokens)]


def _cache_config(engine: ServingEngine, num_pages: int) -> dict[str, float]:
    """Engine configuration under vLLM's names."""
    config = json.loads(engine.info.config_json)
    found = {
        "block_size": config.get("page_size"),
        "cache_dtype": config.get("kv_cache_dtype"),
        "enable_prefix_caching": config.get("enable_prefix_caching"),
        "num_gpu_blocks": num_pages,
    }
    return {label_text(**{name: str(value) for name, value in found.items()}): 1.0}


def _require_loopback(request: Request) -> None:
    """Check for a loopback client: the load tester runs on the same machine; for others this path does not exist."""
    loopback = request.client is not None and is_loopback(request.client.host)
    # A browser sends cross-site JSON only after a preflight, which fails here because CORS is off.
    is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if not loopback or not is_json:
        raise ApiError(404, f"there is nothing at {request.url.path!r}; the API is under /v1")
