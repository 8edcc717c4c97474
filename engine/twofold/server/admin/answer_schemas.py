"""Schemas of the status routes' answers, for /openapi.json. Not used when answers are made."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

Phase = Literal["loading", "ready", "draining", "failed"]


class Version(TypedDict):
    version: str


class Readiness(TypedDict):
    status: Phase


class Health(Readiness):
    """Without a model the fields after `telemetry` are left out."""

    version: str
    uptime_s: float
    telemetry: dict[str, Any]
    model: NotRequired[str]
    max_context: NotRequired[int]
    accelerator: NotRequired[str]
    accelerator_reason: NotRequired[str]
    failure: NotRequired[dict[str, str] | None]
    """state (reloading, replaced, failed), reason and code; set when a GPU failed or a file of weights was changed."""
    emulated: NotRequired[bool]
    clock: NotRequired[str]
    policy: NotRequired[str | None]
    num_slots: NotRequired[int]
    output_changes: NotRequired[list[str]]
    mapped_weights: NotRequired[dict[str, Any] | None]
    queue: NotRequired[dict[str, int]]
    models: NotRequired[dict[str, Any]]
    """With several models: each one's state, and the fields of its engine while it is loaded."""


class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]


class ServerInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    version: str
    tp_size: int
    dp_size: int
    max_running_requests: int
    context_length: int


class SlotParams(TypedDict):
    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    ignore_eos: bool


class NextToken(TypedDict):
    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(TypedDict):
    """An idle slot has neither request nor counts."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    request_id: NotRequired[str]
    n_prompt_tokens: NotRequired[int]
    n_prompt_tokens_processed: NotRequired[int]
    params: NotRequired[SlotParams]
    next_token: NotRequired[list[NextToken]]
    prompt: NotRequired[str]
    model: NotRequired[str]
    """With several models."""


class Props(TypedDict):
    default_generation_settings: Slot
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class ListedAdapter(TypedDict):
    """A LoRA adapter. `scale` is that of requests that name no adapter; `path` is without its directory."""

    id: int
    name: str
    path: str
    scale: float
