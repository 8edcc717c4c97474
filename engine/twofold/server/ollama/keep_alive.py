"""Ollama's `keep_alive`: how long a request's model stays loaded."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from twofold.api.models_config import KEEP_ALIVE_FORM, parsed_keep_alive
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.http.errors import ApiError
from twofold.server.ollama.model_card import served_name


class NamesModel(Protocol):
    """A request body that names a model."""

    @property
    def model(self) -> str: ...

    @property
    def keep_alive(self) -> float | str | None: ...


def using_model(state: ServerState, body: NamesModel) -> AbstractAsyncContextManager[ServedModel]:
    """The request's model, which stays loaded for the request's `keep_alive`. ApiError as `ServerState.using`."""
    return state.using(served_name(state, body.model), keep_alive_s(body))


def keep_alive_s(body: NamesModel) -> float | None:
    """Seconds, inf for ever; None if the request does not say. ApiError 400 for another form."""
    if body.keep_alive is None:
        return None
    seconds = parsed_keep_alive(body.keep_alive)
    if seconds is None:
        problem = f"keep_alive: expected {KEEP_ALIVE_FORM}"
        message = f"{problem} (given: {body.keep_alive!r:.100})"
        raise ApiError(400, message, param="keep_alive", logged=problem)
    return seconds
