"""GET /version, /ready, /props and /slots: server version, readiness, settings and slots (names from llama.cpp)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from twofold import __version__
from twofold.api.types import RequestProgress, SamplingParams
from twofold.server.admin.answer_schemas import Props, Readiness, Slot, Version
from twofold.server.bridge.state import ServerState
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers
from twofold.weights.gguf_file import model_name


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    table = SlotTable()

    @routes.get("/version", response_model=None, responses=answers(Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get(
        "/ready",
        responses=answers(Readiness) | answers(Readiness, status=503, description="Loading or draining"),
    )
    @routes.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """Whether requests are accepted: 503 while the model loads, while it sleeps, and from the first stop signal
        on."""
        engine = state.loaded_engine
        asleep = state.phase == "ready" and engine is not None and engine.control.asleep
        phase = "asleep" if asleep else state.phase
        return JSONResponse({"status": phase}, status_code=200 if phase == "ready" else 503)

    @routes.get("/props", response_model=None, responses=answers(Props))
    async def props() -> dict[str, Any]:
        return _props(state)

    @routes.get("/slots", response_model=None, responses=answers(list[Slot]))
    async def slots(fail_on_no_slot: Annotated[str, Query()] = "") -> list[dict[str, Any]]:
        engine = state.engine_while_draining
        places = table.places(engine.live_requests(), engine.max_num_seqs)
        if fail_on_no_slot in ("1", "true") and None not in places:
            raise ApiError(503, "no slot is free", code="no_slot_available")
        if not state.config.slots_show_prompts:
            return [_slot(state, number, progress) for number, progress in enumerate(places)]
        loop = asyncio.get_running_loop()
        return [
            _slot(state, number, progress)
            | {"prompt": await loop.run_in_executor(state.threads.tokenisers, _prompt_text, state, progress)}
            for number, progress in enumerate(places)
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


def _props(state: ServerState) -> dict[str, Any]:
    engine = state.engine_while_draining
    return {
        "default_generation_settings": _slot(state, 0, None)
        | {"params": _params(state.sampling_defaults), "prompt": ""},
        "total_slots": engine.max_num_seqs,
        "model_alias": state.model_name,
        # The file name only: paths stay private.
        "model_path": model_name(engine.info.model),
        "chat_template": engine.tokenizer.chat_template or "",
        "modalities": {"vision": False, "audio": False},
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


def _slot(state: ServerState, number: int, progress: RequestProgress | None) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": number,
        "id_task": -1 if progress is None else progress.number,
        "n_ctx": state.engine_while_draining.max_context,
        "speculative": state.engine_while_draining.speculates or _has_prediction(progress),
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


def _prompt_text(state: ServerState, progress: RequestProgress | None) -> str:
    if progress is None:
        return ""
    tokenizer = state.engine_while_draining.tokenizer
    return tokenizer.decode(progress.request.prompt_token_ids, skip_special_tokens=False)
