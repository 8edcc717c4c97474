"""State of the application: the engine once loaded, and the phase of the process."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, cast

from twofold import __version__
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams
from twofold.models.registry import chat_marks
from twofold.server.bridge.body_worker import BodyWorker
from twofold.server.bridge.bounded_tokenizer import BoundedTokenizer
from twofold.server.bridge.crossing import AnswerStream, Crossing
from twofold.server.bridge.metrics import Metrics
from twofold.server.bridge.protocol import ServingEngine, ServingTokenizer
from twofold.server.bridge.sampling_defaults import OPENAI_DEFAULTS
from twofold.server.bridge.threads import Threads
from twofold.server.bridge.token_cache import TokenCache
from twofold.server.http.errors import ApiError, unavailable
from twofold.telemetry.sink import TelemetrySink
from twofold.text.chat.marks import ChatMarks, check_parsers, chosen_marks
from twofold.weights.gguf_file import model_name

if TYPE_CHECKING:
    from twofold.server.bridge.spans import RequestSpans

_ANY_NAME: Final = "*"
"""A served name that accepts any model name in requests."""

Phase = Literal["loading", "ready", "draining"]


class ServerState:
    """State shared by all endpoints of one application; changed on the event loop only."""

    def __init__(self, config: ServerConfig, sink: TelemetrySink | None) -> None:
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        self.config = config
        self.sink = sink
        self.metrics = Metrics()
        self.sampling_defaults = OPENAI_DEFAULTS
        self.chat_marks = ChatMarks()
        """The model's markers of tool calls and thinking; known once it is loaded."""
        self.spans = _open_spans(config.otlp_endpoint)
        """Writer of OpenTelemetry spans; None without --otlp-endpoint."""
        self.started_s = time.time()
        self.phase: Phase = "loading"
        self.threads = Threads()
        self.body_worker = BodyWorker()
        self.token_cache: TokenCache | None = None
        """Set if the engine caches prefixes; known once it is loaded."""
        self.answers: set[AnswerStream] = set()
        """Submitted answers whose client is still connected."""
        self.computing_paths: set[str] = set()
        """Paths of POST requests that a full server refuses before reading them; the routers add theirs."""
        self._engine: ServingEngine | None = None

    def ready(self, engine: ServingEngine, sampling_defaults: SamplingParams | None = None) -> None:
        """Enter the phase "ready": the engine is loaded and takes requests from now on."""
        self._engine = engine
        self.metrics.set_context(engine.max_context)
        self.sampling_defaults = sampling_defaults or OPENAI_DEFAULTS
        self.token_cache = TokenCache() if engine.caches_prefixes else None
        self.chat_marks = _chat_marks(self.config, engine)
        if self.phase == "loading":
            self.phase = "ready"

    def close(self) -> None:
        """Stop the threads and the process that prepare requests."""
        self.threads.close()
        self.body_worker.close()
        if self.spans is not None:
            self.spans.close()

    @cached_property
    def crossing(self) -> Crossing:
        """The crossing, created on the event loop that asks first (the application has only one)."""
        return Crossing()

    @property
    def loaded_engine(self) -> ServingEngine | None:
        return self._engine

    @property
    def engine(self) -> ServingEngine:
        """The engine, for endpoints that need it. ApiError 503 while it loads or drains."""
        if self.phase == "draining":
            message = "the server is shutting down and takes no new requests; send it to another one or later"
            raise unavailable(message, "server_draining", 5)
        return self.engine_while_draining

    @property
    def engine_while_draining(self) -> ServingEngine:
        """The engine, for queries that compute nothing. ApiError 503 while it loads."""
        if self._engine is None:
            raise unavailable(
                "the model is still loading; /health tells when it is ready", "model_loading", 2
            )
        return self._engine

    @property
    def tokenizer(self) -> ServingTokenizer:
        """The engine's tokenizer, bounded for texts that are too long. ApiError 503 as `engine`."""
        return cast(ServingTokenizer, BoundedTokenizer(self.engine.tokenizer, self.engine.max_context))

    @cached_property
    def _given_names(self) -> tuple[str, ...]:
        """The names of --served-model-name, without duplicates."""
        given = ",".join(self.config.served_model_name)
        return tuple(dict.fromkeys(name.strip() for name in given.split(","))) if given else ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The listed names: those of --served-model-name, else that of the model's directory or file."""
        given = tuple(name for name in self._given_names if name != _ANY_NAME)
        if given:
            return given
        return () if self._engine is None else (model_name(self._engine.info.model),)

    @property
    def model_name(self) -> str:
        """The first model name, used in answers and records."""
        return next(iter(self.model_names), "")

    def check_model(self, name: str | None) -> None:
        """Check a request's model name; None means the loaded model. ApiError 404 for an unknown name, unless any is
        accepted."""
        if name is not None and name not in self.model_names and _ANY_NAME not in self._given_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server serves {served}; --served-model-name gives "
                f"it more names, and --served-model-name '{_ANY_NAME}' any name",
                param="model",
                code="model_not_found",
            )


def _open_spans(endpoint: str | None) -> RequestSpans | None:
    """ConfigError if OpenTelemetry is asked for and not installed."""
    if endpoint is None:
        return None
    try:
        from twofold.server.bridge.spans import otlp_spans
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint was given, but OpenTelemetry cannot be imported ({error}); "
            "install it: pip install 'twofold[otel]'"
        ) from None
    return otlp_spans(endpoint, __version__)


def _chat_marks(config: ServerConfig, engine: ServingEngine) -> ChatMarks:
    """Chat marks of the served model; --tool-call-parser and --reasoning-parser override them."""
    shown = chat_marks(engine.info.architecture, engine.tokenizer.chat_template)
    return chosen_marks(shown, config.tool_call_parser, config.reasoning_parser)
