"""LoRA adapters while the server runs: vLLM's and SGLang's routes to load and unload, and llama.cpp's scales.

All but GET /lora-adapters need the admin key: they read files or change the answers of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import RootModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.server.admin.answer_schemas import ListedAdapter
from twofold.server.bridge.models.adapted_model import scales_by_name
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import small_body
from twofold.server.http.bodies import Body, LoraScales, refused
from twofold.server.http.errors import ApiError, wrong_field
from twofold.server.http.openapi import answers

_MAX_BODY: Final = 16_384


class LoadBody(Body):
    """vLLM's and SGLang's fields."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace a loaded adapter of this name; its running requests finish with the old one."""
    pinned: refused("the least recently used adapter leaves memory; raise --max-cpu-loras") = None  # type: ignore[valid-type]


class UnloadBody(Body):
    lora_name: str


class ScalesBody(RootModel[LoraScales]):
    """Scales for requests that name no adapter; adapters that are not listed get 0."""


def router(state: ServerState) -> APIRouter:
    """The route that anyone may ask."""
    routes = APIRouter()

    @routes.get("/lora-adapters", response_model=None, responses=answers(list[ListedAdapter]))
    async def adapters(request: Request) -> list[dict[str, Any]]:
        """Adapters with the scales that requests get that name none, in llama.cpp's form."""
        _ = state.queried(request).engine_while_draining
        return [
            # Clients do not learn the server's directories.
            {"id": each.number, "name": each.name, "path": each.path.name, "scale": each.scale}
            for each in state.queried(request).adapters.values()
        ]

    return routes


def admin_router(state: ServerState) -> APIRouter:
    """The routes of the server's operator."""
    routes = APIRouter(include_in_schema=False)

    @routes.post("/lora-adapters")
    async def set_scales(request: Request) -> dict[str, bool]:
        model = _only_model(state)
        body = await small_body(request, ScalesBody, _MAX_BODY)
        try:
            model.engine.adapters.set_scales(scales_by_name(model, body.root, "id"))
        except KeyError:
            raise ApiError(404, "an adapter has just been unloaded; ask GET /lora-adapters again") from None
        return {"success": True}

    async def load(request: Request) -> str:
        model = _only_model(state)
        body = await small_body(request, LoadBody, _MAX_BODY)
        _check_name(model, body)
        engine = model.engine

        def work() -> None:
            engine.adapters.load(body.lora_name, _path_below(engine.config.lora_dir, body.lora_path))

        try:
            await asyncio.to_thread(work)
        except (ConfigError, ModelLoadError, OSError) as error:
            raise ApiError(400, str(error), param="lora_path", code="adapter_load_failed") from None
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def unload(request: Request) -> str:
        model = _only_model(state)
        body = await small_body(request, UnloadBody, _MAX_BODY)
        try:
            await asyncio.to_thread(model.engine.adapters.unload, body.lora_name)
        except KeyError:
            known = ", ".join(map(repr, model.adapters)) or "none"
            raise ApiError(
                404, f"there is no adapter {body.lora_name[:200]!r}; loaded: {known}", param="lora_name"
            ) from None
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def loaded() -> dict[str, str]:
        return {name: each.path.name for name, each in state.default.adapters.items()}

    for name, work in (("load", load), ("unload", unload)):
        routes.add_api_route(f"/v1/{name}_lora_adapter", _vllm_answer(work), methods=["POST"])
        routes.add_api_route(f"/{name}_lora_adapter", _sglang_answer(work, loaded), methods=["POST"])
    return routes


def _vllm_answer(work: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(await work(request))

    return answer


def _sglang_answer(
    work: Callable[[Request], Any], loaded: Callable[[], dict[str, str]]
) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        await work(request)
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded()})

    return answer


def _only_model(state: ServerState) -> ServedModel:
    if state.manager is not None:
        raise ApiError(
            400, "adapters are served beside one model, and this server has several; serve it alone"
        )
    return state.default


def _check_name(model: ServedModel, body: LoadBody) -> None:
    """ApiError 400 for a name that the adapter cannot have."""
    if body.lora_name in model.names:
        raise wrong_field(
            "lora_name", f"{body.lora_name!r} is the model's own name; give the adapter another one"
        )
    if body.lora_name in model.adapters and not body.load_inplace:
        raise wrong_field(
            "lora_name",
            f"{body.lora_name[:200]!r} is loaded already; load_inplace: true loads its files again",
        )


def _path_below(directory: str | None, given: str) -> Path:
    """The path of the adapter below --lora-dir, all links followed.

    Raises:
        ApiError: 400 without --lora-dir or for a path outside it, 404 for one that does not exist.
    """
    if directory is None:
        raise ApiError(
            400,
            "lora_path: this server loads no adapters while it runs; start it with --lora-dir DIR to load them from "
            "below DIR",
            param="lora_path",
            code="no_lora_dir",
        )
    root = Path(directory).expanduser().resolve()
    try:
        path = (root / given).resolve()
        files = list(path.iterdir()) if path.is_relative_to(root) and path.is_dir() else []
        is_inside = all(each.is_relative_to(root) for each in (path, *(file.resolve() for file in files)))
        exists = is_inside and path.exists()
    except (OSError, ValueError):
        is_inside = exists = False
    if not is_inside:
        raise wrong_field("lora_path", f"{given[:200]!r} is not below --lora-dir, with links followed")
    if not exists:
        raise ApiError(
            404, f"lora_path: there is no adapter {given[:200]!r} below --lora-dir", param="lora_path"
        )
    return path
