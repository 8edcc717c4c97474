"""What all models of one server share: settings, phase, threads, the way back from the engines, counts of HTTP."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from twofold import __version__
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.bridge.models.body_worker import BodyWorker
from twofold.server.bridge.models.crossing import Crossing
from twofold.server.bridge.models.threads import Threads
from twofold.server.bridge.observe.metrics import HttpCounts
from twofold.server.bridge.observe.request_log import RequestLog
from twofold.server.http.errors import unavailable
from twofold.server.http.picture_sources import PictureSources

if TYPE_CHECKING:
    from twofold.server.bridge.observe.spans import RequestSpans

Phase = Literal["loading", "ready", "draining"]


class ServerResources:
    """Shared by all models of a server; changed on the event loop only."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.spans = _open_spans(config.otlp_endpoint)
        """Writer of OpenTelemetry spans; None without --otlp-endpoint."""
        self.http = HttpCounts()
        self.request_log = RequestLog(logs_all=config.log_requests)
        self.started_s = time.time()
        self.phase: Phase = "loading"
        self.threads = Threads()
        self.body_worker = BodyWorker()
        self.picture_sources = PictureSources.of(config)

    @cached_property
    def crossing(self) -> Crossing:
        """The crossing, created on the event loop that asks first (the application has only one)."""
        return Crossing()

    def refuse_while_draining(self) -> None:
        """ApiError 503 after the first stop signal."""
        if self.phase == "draining":
            message = "the server is shutting down and takes no new requests; send it to another one or later"
            raise unavailable(message, "server_draining", 5)

    def close(self) -> None:
        """Stop the threads and the process that prepare requests."""
        self.threads.close()
        self.body_worker.close()
        if self.spans is not None:
            self.spans.close()


def _open_spans(endpoint: str | None) -> RequestSpans | None:
    """ConfigError if OpenTelemetry is asked for and not installed."""
    if endpoint is None:
        return None
    try:
        from twofold.server.bridge.observe.spans import otlp_spans
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint was given, but OpenTelemetry cannot be imported ({error}); "
            "install it: pip install 'twofold[otel]'"
        ) from None
    return otlp_spans(endpoint, __version__)
