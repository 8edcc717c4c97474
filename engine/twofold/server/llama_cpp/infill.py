"""POST /infill: llama.cpp's route for editors, translated to a gap of /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.server.bridge.models.protocol import Prompt, ServingTokenizer
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body, translated
from twofold.server.http.openapi import answers, body_of, events_of
from twofold.server.llama_cpp.answer_schemas import InfillAnswer, InfillEvent
from twofold.server.llama_cpp.formats import InfillFormat
from twofold.server.llama_cpp.schemas import InfillRequest
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.fill_in import file_tokens, fill_prompt
from twofold.server.openai.routes import fill_gap

_ANSWER_SHARE: Final = 4
"""One part in so many of the context is left for an answer without a limit."""


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    state.computing_paths |= {"/infill"}

    @routes.post(
        "/infill",
        openapi_extra=body_of(InfillRequest),
        responses=answers(InfillAnswer, stream=events_of(InfillAnswer | InfillEvent, with_done=False)),
    )
    async def infill(request: Request) -> Response:
        body = await parse_body(request, InfillRequest, state)
        async with state.using(body.model, lora=body.lora) as model:
            # The prompt is made of the texts below; this one only makes the request valid.
            fields = body.completion_fields() | {"model": model.name, "prompt": " "}
            requested = translated(CompletionRequest, fields, model)
            tokenise = partial(infill_prompts, body, model.tokenizer, model.engine.max_context)
            shown = partial(InfillFormat, response_fields=body.response_fields or ())
            return await fill_gap(request, model, requested, shown, tokenise)

    return routes


def infill_prompts(body: InfillRequest, tokenizer: ServingTokenizer, max_context: int) -> list[Prompt]:
    """The prompt: other files, as many of their last tokens as the context holds, then the file with the gap."""
    before = tokenizer.encode(body.input_prefix + (body.prompt or ""))
    begin = tokenizer.encode("", add_special_tokens=True)[:1]
    gap = fill_prompt(before, body.input_suffix, tokenizer, begins=False, field="input_suffix")
    limit = body.n_predict
    answer = max_context // _ANSWER_SHARE if limit is None or limit < 0 else max(1, limit)
    files = file_tokens([(each.filename, each.text) for each in body.input_extra or ()], tokenizer)
    left_out = max(0, len(files) - max(0, max_context - len(begin) - len(gap) - answer))
    return [Prompt((*begin, *files[left_out:], *gap))]
