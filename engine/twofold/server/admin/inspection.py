"""GET /version, /ready, /props and /slots: server version, readiness, settings and slots (names from llama.cpp)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from twofold import __version__
from twofold.api.types import RequestProgress, SamplingParams
from twofold.server.admin.answer_schemas import Props, Readiness, Slot, Version
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers
from twofold.weights.gguf_file import model_name


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    tables: dict[ServedModel, SlotTable] = {}

    @routes.get("/version", response_model=None, responses=answers(Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get(
        "/ready",
        responses=answers(Readiness)
        | answers(Readiness, status=503, description="Loading, draining or failed"),
    )
    @routes.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """Whether requests are accepted: 503 while the model loads, while it sleeps, after its device has failed, and
        from the first stop signal on."""
        phase = phase_of(state, state.default)
        return JSONResponse({"status": phase}, status_code=200 if phase == "ready" else 503)

    @routes.get("/props", response_model=None, responses=answers(Props))
    async def props(request: Request) -> dict[str, Any]:
        """`?model=` chooses among several models; else it is the one used last."""
        return _props(state.queried(request))

    @routes.get("/slots", response_model=None, responses=answers(list[Slot]))
    async def slots(request: Request, fail_on_no_slot: Annotated[str, Query()] = "") -> list[dict[str, Any]]:
        """The slots of all loaded models, or of the one that `?model=` names."""
        one = "model" in request.query_params or not state.loaded_models
        models = [state.queried(request)] if one else state.loaded_models
        found: list[tuple[ServedModel, int, RequestProgress | None]] = []
        for model in models:
            engine = model.engine_while_draining
            table = tables.setdefault(model, SlotTable())
            places = table.places(engine.control.requests(), engine.config.max_num_seqs)
            found += [(model, number, progress) for number, progress in enumerate(places)]
        if fail_on_no_slot in ("1", "true") and all(progress is not None for _, _, progress in found):
            raise ApiError(503, "no slot is free", code="no_slot_available")
        described = [_slot(*place) for place in found]
        if state.manager is not None:
            described = [
                slot | {"model": model.name} for slot, (model, *_) in zip(described, found, strict=True)
            ]
        if not state.config.slots_show_prompts:
            return described
        loop = asyncio.get_running_loop()
        return [
            slot
            | {"prompt": await loop.run_in_executor(state.threads.tokenisers, _prompt_text, model, progress)}
            for slot, (model, _, progress) in zip(described, found, strict=True)
        ]

    return routes


class SlotTable:
    """Assigns stable slot numbers to running requests, as other servers have; the engine has none."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}

    def places(self, live: Sequence[RequestProgress], total: int) -> list[RequestProgress | None]:
        """The request in each of `total` slots."""
        running = {progress.number: progress for progress in live if progress.is_running}
        kept = {number: slot for number, slot in self._slot_of.items() if number in running}
        free = iter(sorted(set(range(max(total, len(running)))) - set(kept.values())))
        self._slot_of = {number: kept[number] if number in kept else next(free) for number in running}
        by_slot = {slot: running[number] for number, slot in self._slot_of.items()}
        return [by_slot.get(slot) for slot in range(total)]


def phase_of(state: ServerState, model: ServedModel) -> str:
    """The server's phase, or "asleep" while the single model's memory is freed."""
    engine = model.loaded_engine
    asleep = state.phase == "ready" and engine is not None and engine.control.asleep
    return "asleep" if asleep and state.manager is None else state.serving_phase


def _props(model: ServedModel) -> dict[str, Any]:
    engine = model.engine_while_draining
    return {
        "default_generation_settings": _slot(model, 0, None)
        | {"params": _params(model.sampling_defaults), "prompt": ""},
        "total_slots": engine.config.max_num_seqs,
        "model_alias": model.name,
        # The file name only: paths stay private.
        "model_path": model_name(engine.info.model),
        "chat_template": engine.tokenizer.chat_template or "",
        "modalities": {"vision": model.reads_pictures, "audio": False},
        "build_info": f"twofold-{__version__}",
        "is_sleeping": engine.control.asleep,
    }


def _params(sampling: SamplingParams) -> dict[str, Any]:
    """Default sampling parameters under llama.cpp's names; -1: no limit, no seed."""
    return {
        "n_predict": -1,
        "max_tokens": -1,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
    }


def _slot(model: ServedModel, number: int, progress: RequestProgress | None) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": number,
        "id_task": -1 if progress is None else progress.number,
        "n_ctx": model.engine_while_draining.max_context,
        "speculative": model.engine_while_draining.speculates or _has_prediction(progress),
        "is_processing": progress is not None,
    }
    if progress is None:
        return slot
    num_prompt = len(progress.request.prompt_token_ids)
    remain = progress.max_tokens - progress.num_generated
    return slot | {
        "request_id": progress.request.request_id,
        "n_prompt_tokens": num_prompt,
        "n_prompt_tokens_processed": min(progress.num_computed, num_prompt),
        "params": _params(progress.request.sampling),
        "next_token": [
            {"has_next_token": remain > 0, "n_remain": remain, "n_decoded": progress.num_generated}
        ],
    }


def _has_prediction(progress: RequestProgress | None) -> bool:
    return progress is not None and bool(progress.request.prediction)


def _prompt_text(model: ServedModel, progress: RequestProgress | None) -> str:
    if progress is None:
        return ""
    tokenizer = model.engine_while_draining.tokenizer
    return tokenizer.decode(progress.request.prompt_token_ids, skip_special_tokens=False)
