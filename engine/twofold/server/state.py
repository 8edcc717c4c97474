"""What the application knows about itself: the engine once it is there, and the phase of the process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Literal

from twofold.api.config import ServerConfig
from twofold.api.types import SamplingParams
from twofold.chat.marks import ChatMarks, check_parsers
from twofold.server.api_errors import ApiError
from twofold.server.body_worker import BodyWorker
from twofold.server.bounded_tokenizer import BoundedTokenizer
from twofold.server.bridge import AnswerStream, Crossing
from twofold.server.chat_reading import marks_of
from twofold.server.kept_tokens import KeptTokens
from twofold.server.metrics import Metrics
from twofold.server.protocol import ServingEngine
from twofold.server.sampling_defaults import OPENAI_DEFAULTS
from twofold.telemetry.sink import TelemetrySink
from twofold.weights.gguf_file import model_name

Phase = Literal["loading", "ready", "draining"]


class ServerState:
    """Shared by all endpoints of one application; changed on the event loop only."""

    def __init__(self, config: ServerConfig, sink: TelemetrySink | None) -> None:
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        self.config = config
        self.sink = sink
        self.metrics = Metrics()
        self.sampling_defaults = OPENAI_DEFAULTS
        self.chat_marks = ChatMarks()
        """How the model marks calls of tools and its thinking; known once it is loaded."""
        self.started_s = time.time()
        self.phase: Phase = "loading"
        # Two, so that a long prompt does not delay a short one. Tokenising releases the GIL.
        self.workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self.body_worker = BodyWorker()
        # One: the worker takes one body after the other, and nobody else waits behind a large one.
        self.parsers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        # Several, so that a grammar that has been compiled does not wait behind one that is new.
        self.compilers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="compile")
        self.kept_tokens: KeptTokens | None = None
        """Where prefixes are cached; known once the engine is."""
        self.answers: set[AnswerStream] = set()
        """Those that have been submitted and whose client still listens."""
        self._engine: ServingEngine | None = None

    def ready(self, engine: ServingEngine, sampling_defaults: SamplingParams | None = None) -> None:
        """The engine is loaded and takes requests from now on."""
        self._engine = engine
        self.sampling_defaults = sampling_defaults or OPENAI_DEFAULTS
        self.kept_tokens = KeptTokens() if engine.caches_prefixes else None
        self.chat_marks = marks_of(self.config, engine)
        if self.phase == "loading":
            self.phase = "ready"

    def close(self) -> None:
        """End the threads and the process that prepared requests."""
        for executor in (self.workers, self.parsers, self.compilers):
            executor.shutdown(wait=False, cancel_futures=True)
        self.body_worker.close()

    @cached_property
    def crossing(self) -> Crossing:
        """Made on the event loop that asks first, which is the application's only one."""
        return Crossing()

    @property
    def loaded_engine(self) -> ServingEngine | None:
        return self._engine

    @property
    def engine(self) -> ServingEngine:
        """The engine, for an endpoint that cannot do without. ApiError 503 while it loads or drains."""
        if self.phase == "draining":
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests; send it to another one or later",
                kind="server_error",
                code="server_draining",
                headers={"Retry-After": "5"},
            )
        return self.engine_while_draining

    @property
    def engine_while_draining(self) -> ServingEngine:
        """The engine, for who asks and computes nothing. ApiError 503 while it loads."""
        if self._engine is None:
            raise ApiError(
                503,
                "the model is still being loaded; ask /health when it is ready",
                kind="server_error",
                code="model_loading",
                headers={"Retry-After": "2"},
            )
        return self._engine

    @property
    def tokenizer(self) -> BoundedTokenizer:
        """The engine's, which does not tokenise all of a text that is too long. ApiError 503 as `engine`."""
        return BoundedTokenizer(self.engine.tokenizer, self.engine.max_context)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use: those of --served-model-name, else that of the model's directory or file."""
        given = ",".join(self.config.served_model_name)
        if given:
            return tuple(dict.fromkeys(name.strip() for name in given.split(",")))
        return () if self._engine is None else (model_name(self._engine.info.model),)

    @property
    def model_name(self) -> str:
        """The first of them, which answers and records say."""
        return next(iter(self.model_names), "")

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is. ApiError 404 for any other."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server serves {served}; --served-model-name gives "
                "it more names",
                param="model",
                code="model_not_found",
            )
