"""/admin routes: status and live control for the server's operator, protected by a separate key.

Without --admin-key they do not exist: `middleware.RequestFrame` answers 404 and names the flag. Requests are listed by
size, never by content.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from twofold import __version__
from twofold.api.control import MemoryUse, Resize
from twofold.api.errors import ConfigError
from twofold.api.types import RequestProgress
from twofold.server.admin.inspection import phase_of
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import small_body
from twofold.server.http.errors import ApiError

T = TypeVar("T")

_MAX_BODY: Final = 4096
_MAX_PLACEMENT_BODY: Final = 1 << 20
"""Body limit of a placement; Kimi K2's 23,000 experts take 120 kB."""
_MOST_REQUESTS: Final = 1000
"""Most requests in one listing."""


class ResizeBody(BaseModel):
    """Body of a resize; see `Resize`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gpu_experts_ratio: float | None = None
    num_gpu_experts: int | None = None
    max_total_tokens: int | None = None


class PlacementBody(BaseModel):
    """Resident experts of each MoE layer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    resident: list[list[Annotated[int, Field(ge=0, le=65_535)]]]


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/admin", include_in_schema=False)
    _add_requests(routes, state)
    _add_placement(routes, state)

    @routes.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        return _status(state, state.queried(request))

    @routes.post("/resize")
    async def resize(request: Request) -> dict[str, Any]:
        control = state.queried(request).engine.control
        requested = await small_body(request, ResizeBody, _MAX_BODY)
        await _change(control.resize, Resize(**requested.model_dump()))
        return {"memory": _memory(control.memory())}

    @routes.post("/sleep")
    async def sleep(request: Request) -> dict[str, Any]:
        model = state.queried(request)
        control = model.engine.control
        await _change(control.sleep)
        return {"state": phase_of(state, model), "memory": _memory(control.memory())}

    @routes.post("/wake")
    async def wake(request: Request) -> dict[str, Any]:
        model = state.queried(request)
        control = model.engine.control
        await _change(control.wake)
        return {"state": phase_of(state, model), "memory": _memory(control.memory())}

    return routes


def _add_requests(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/requests")
    async def requests(request: Request) -> dict[str, Any]:
        live = state.queried(request).engine_while_draining.control.requests()
        now = time.time()
        return {
            "num_requests": len(live),
            "requests": [_request(progress, now) for progress in live[:_MOST_REQUESTS]],
        }

    @routes.delete("/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> dict[str, str]:
        engine = state.queried(request).engine_while_draining
        # A request for several answers is several engine requests under one client-visible id.
        pattern = re.compile(re.escape(request_id) + r"(-\d+)?", re.ASCII)
        own = {
            name for each in engine.control.requests() if pattern.fullmatch(name := each.request.request_id)
        }
        if not own:
            message = (
                f"no request {request_id[:200]!r} is running or waiting; `twofold ctl requests` lists them"
            )
            raise ApiError(404, message)
        for name in own:
            engine.cancel(name)
        return {"cancelled": request_id}


def _add_placement(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/cache")
    async def cache(request: Request) -> dict[str, Any]:
        engine = state.queried(request).engine_while_draining
        placed = await asyncio.to_thread(engine.control.placement, None, 1)
        return _cache(engine) | {
            "expert_slots_per_layer": [
                {"layer": layer.layer, "resident": layer.num_resident, "of": engine.info.num_experts}
                for layer in placed
            ]
        }

    @routes.post("/cache/drop_prefixes")
    async def drop_prefixes(request: Request) -> dict[str, int]:
        control = state.queried(request).engine_while_draining.control
        return {"dropped_pages": await asyncio.to_thread(control.drop_prefixes)}

    @routes.get("/placement")
    async def placement(request: Request) -> dict[str, Any]:
        layer, top = _whole(request, "layer"), _whole(request, "top")
        engine = state.queried(request).engine_while_draining
        layers = None if layer is None else [layer]
        try:
            placed = await asyncio.to_thread(engine.control.placement, layers, 16 if top is None else top)
        except ConfigError as error:
            raise ApiError(400, str(error), param="layer") from None
        return {
            "layers": [
                {
                    "layer": each.layer,
                    "resident": each.num_resident,
                    "experts": [
                        {"expert": expert, "state": where, "worth": worth}
                        for expert, where, worth in each.experts
                    ],
                }
                for each in placed
            ],
            "dynamic_update": dict(engine.stats().dynamic_update),
        }

    @routes.get("/placement/experts")
    async def placed_experts(request: Request) -> dict[str, Any]:
        model = state.queried(request)
        found = await asyncio.to_thread(model.engine_while_draining.control.expert_placement)
        return found._asdict() | {"model": model.name}

    @routes.post("/placement/experts")
    async def place_experts(request: Request) -> dict[str, int]:
        control = state.queried(request).engine.control
        requested = await small_body(request, PlacementBody, _MAX_PLACEMENT_BODY)
        return {"uploaded": await _change(control.place_experts, requested.resident)}


async def _change(work: Callable[..., T], *arguments: Any) -> T:
    """Run a change of the engine on a thread. ApiError 400 for one that cannot be made."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except ConfigError as error:
        raise ApiError(400, str(error), code="does_not_fit") from None


def _status(state: ServerState, model: ServedModel) -> dict[str, Any]:
    engine = model.engine_while_draining
    info, stats = engine.info, engine.stats()
    return {
        "model": model.name,
        "aliases": list(model.names[1:]),
        "version": __version__,
        "state": phase_of(state, model),
        "uptime_s": round(time.time() - state.started_s, 3),
        "accelerator": info.accelerator,
        "clock": info.clock,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "max_num_seqs": engine.config.max_num_seqs,
        "decode_tokens_per_s": round(stats.decode_tokens_per_s, 3),
        "memory": _memory(engine.control.memory()),
    }


def _memory(use: MemoryUse) -> dict[str, Any]:
    return dataclasses.asdict(use) | {
        "kv_bytes": use.num_pages * use.page_bytes,
        "kv_tokens": use.num_pages * use.page_size,
        "prefix_cache_bytes": use.num_cached_pages * use.page_bytes + use.num_snapshots * use.record_bytes,
    }


def _cache(engine: ServingEngine) -> dict[str, Any]:
    stats, use = engine.stats(), engine.control.memory()
    return {
        "policy": engine.info.policy or None,
        "expert_slots": use.num_slots,
        "slots_bytes": use.slots_bytes,
        "experts": dataclasses.asdict(stats.placement),
        "prefix_cache": {
            "pages": use.num_cached_pages,
            "snapshots": use.num_snapshots,
            "bytes": use.num_cached_pages * use.page_bytes + use.num_snapshots * use.record_bytes,
            "queried_tokens": stats.prefix_cache_queries,
            "hit_tokens": stats.prefix_cache_hits,
        },
    }


def _request(progress: RequestProgress, now: float) -> dict[str, Any]:
    request = progress.request
    return {
        "id": request.request_id,
        "endpoint": request.endpoint,
        "state": "running" if progress.is_running else "waiting",
        "prompt_tokens": len(request.prompt_token_ids),
        "computed_tokens": progress.num_computed,
        "cached_tokens": progress.num_cached,
        "generated_tokens": progress.num_generated,
        "max_tokens": progress.max_tokens,
        "age_s": round(max(now - progress.submitted_s, 0.0), 3),
    }


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(400, f"{name} was given {text[:200]!r}; it takes a whole number", param=name)
    return int(text)
