"""Delivers chunks to the callers of their requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from twofold.api.types import Chunk, GenerationRequest

_log = logging.getLogger(__name__)


class Delivery:
    """Calls the requests' callbacks. Exceptions in them are logged and affect no other request."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """cancel: called with the id of a request whose `on_chunk` raised before its last chunk."""
        self._cancel = cancel
        self._to_wake: set[Callable[[], None]] = set()

    def deliver(self, request: GenerationRequest, chunk: Chunk) -> None:
        try:
            request.on_chunk(chunk)
        except Exception:
            _log.exception("on_chunk of request %s failed", request.request_id)
            if chunk.finish_reason is None:
                self._cancel(request.request_id)
        if request.after_step is not None:
            self._to_wake.add(request.after_step)

    def wake(self) -> None:
        """Call each `after_step` once, after the step's last chunk."""
        while self._to_wake:
            wake = self._to_wake.pop()
            try:
                wake()
            except Exception:
                _log.exception("after_step of a request failed")
