"""One request as telemetry stores it: a field is a column."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from twofold.api.types import FinishReason, SamplingParams


@dataclass(frozen=True)
class RequestFacts:
    """One request as telemetry stores and shows it. Native events refer to `number`."""

    number: Annotated[int, "`request` in events"]
    request_id: str
    endpoint: str
    submitted_s: Annotated[float, "Unix time"]
    first_token_s: float | None
    finished_s: float | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Annotated[FinishReason | None, "NULL while it runs"]
    queue_s: Annotated[float, "run clock"] = 0.0
    prefill_s: Annotated[float, "run clock"] = 0.0
    decode_s: Annotated[float, "run clock"] = 0.0
    cached_tokens: Annotated[int, "prompt tokens that hit the prefix cache"] = 0
    received_s: Annotated[
        float, "Unix time of the request's first byte, or of its submission without HTTP"
    ] = 0.0
    read_s: Annotated[float, "wall: first byte to the end of the body"] = 0.0
    parse_wait_s: Annotated[float, "wall: wait for the process that parses large bodies"] = 0.0
    parse_s: Annotated[float, "wall: body parsed and checked"] = 0.0
    encode_s: Annotated[float, "wall: pictures fetched and encoded"] = 0.0
    tokenise_wait_s: Annotated[float, "wall: wait for a tokeniser thread"] = 0.0
    template_s: Annotated[float, "wall: chat template rendered"] = 0.0
    tokenise_s: Annotated[float, "wall: prompt tokenised"] = 0.0
    compile_s: Annotated[float, "wall: grammar of a constrained answer compiled"] = 0.0
    queue_wall_s: Annotated[float, "wall: end of those parts to first scheduled"] = 0.0
    prefill_wall_s: Annotated[float, "wall: first scheduled to first token"] = 0.0
    decode_wall_s: Annotated[float, "wall: first token to last token"] = 0.0
    first_sent_s: Annotated[
        float | None, "Unix time at which the first token was handed to the connection; NULL without HTTP"
    ] = None
    answer_json: Annotated[str | None, "with --telemetry-text: text of each answer token, a JSON list"] = None
    accepted_tokens: Annotated[int, "drafted tokens that became part of the answer"] = 0
    rejected_tokens: Annotated[int, "drafted tokens that did not"] = 0
    trace_id: Annotated[str, "W3C trace id that came with the request; empty without one"] = ""
    routed_by: Annotated[
        str, "why a fleet's router chose the replica: prefix, load, retry; empty: no router"
    ] = ""
    adapter: Annotated[str, "LoRA adapter that computed it, or NAME*SCALE of several; empty: none"] = ""
    num_pictures: Annotated[int, "pictures of the prompt"] = 0
    image_tokens: Annotated[int, "prompt tokens that stand for rows of pictures"] = 0
    picture_pixels: Annotated[int, "pixels of the pictures as sent"] = 0
    pictures_json: Annotated[
        str | None,
        "with --telemetry-text: small views of the pictures, a JSON list of JPEG files in base64",
    ] = None
    longest_gap_s: Annotated[
        float | None,
        "wall: longest time from one token of the answer to the next; NULL: fewer than two, or version 8",
    ] = None


@dataclass(frozen=True)
class RequestRecord(RequestFacts):
    """One request as the engine reports it."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
