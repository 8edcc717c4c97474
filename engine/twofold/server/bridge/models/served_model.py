"""One model of the server: its names, its state, and its engine while it is loaded."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from twofold.api.config import ServerConfig
from twofold.api.types import LoadedAdapter, SamplingParams
from twofold.models.registry import chat_marks
from twofold.server.bridge.models.crossing import AnswerStream
from twofold.server.bridge.models.prompt_tokens import BoundedTokenizer, TokenCache
from twofold.server.bridge.models.protocol import ListedAdapter, ServingEngine, ServingTokenizer
from twofold.server.bridge.models.resources import ServerResources
from twofold.server.bridge.models.sampling_defaults import OPENAI_DEFAULTS
from twofold.server.bridge.observe.metrics import Metrics
from twofold.server.http.errors import unavailable
from twofold.telemetry.sink import TelemetrySink
from twofold.text.chat.marks import ChatMarks, chosen_marks

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True)
class ModelDescription:
    """Properties of a model's files, read without loading it."""

    architecture: str
    max_context: int
    limit_reason: str = ""
    """The limit that ends the context before the model's own does."""


class LoadedModel(Protocol):
    """A started engine, and all that ends with it."""

    engine: ServingEngine
    sampling_defaults: SamplingParams | None
    num_bytes: int
    """Memory that it takes."""
    sink: TelemetrySink | None

    def close(self) -> None:
        """End the engine and free its memory. Blocks."""


class ModelSource(Protocol):
    """Loads one model. All methods block, and raise TwofoldError or OSError."""

    path: str
    """The model's directory or file, or its name on a hub."""

    def describe(self) -> ModelDescription: ...

    def required_bytes(self) -> int:
        """Memory that the model takes when loaded. ConfigError, with what would fit, if it cannot fit alone."""
        ...

    def load(self) -> LoadedModel: ...


class ServedModel:
    """Changed on the event loop only."""

    def __init__(
        self, server: ServerResources, names: tuple[str, ...] = (), source: ModelSource | None = None
    ) -> None:
        """names: empty if the engine gives the name. source: None for an engine that is never unloaded."""
        self.server = server
        self.source = source
        self.names = names
        """The listed names."""
        self.metrics = Metrics()
        self.sampling_defaults = OPENAI_DEFAULTS
        self.chat_marks = ChatMarks()
        """The model's markers of tool calls and thinking; known once it is loaded."""
        self.token_cache: TokenCache | None = None
        """Set if the engine caches prefixes; known once it is loaded."""
        self.answers: set[AnswerStream] = set()
        """Answers whose client is still connected."""
        self.description: ModelDescription | None = None
        """Known once its files were read."""
        self.state: ModelState = "loading" if source is None else "unloaded"
        self.problem = ""
        """Why the last attempt to load it failed."""
        self.last_used_s = 0.0
        """Time of the last request, on the clock of `time.time`."""
        self.sink: TelemetrySink | None = None
        """Takes the telemetry of its present run."""
        self.on_answer_closed: Callable[[], None] | None = None
        self.adapter: LoadedAdapter | None = None
        """The adapter of the request that this is the model of; see `with_adapter`."""
        self._engine: ServingEngine | None = None

    def loaded(
        self,
        engine: ServingEngine,
        sampling_defaults: SamplingParams | None = None,
        sink: TelemetrySink | None = None,
    ) -> None:
        """Serve requests by `engine` from now on."""
        self._engine, self.sink = engine, sink
        self.metrics.set_context(engine.max_context)
        self.sampling_defaults = sampling_defaults or OPENAI_DEFAULTS
        self.token_cache = TokenCache() if engine.config.enable_prefix_caching else None
        self.chat_marks = _chat_marks(self.server.config, engine)
        self.description = ModelDescription(
            engine.info.architecture, engine.max_context, engine.info.context_limit_reason
        )
        self.state, self.problem = "loaded", ""
        self.last_used_s = time.time()

    def unloaded(self) -> None:
        """Forget the engine, which its owner has closed."""
        self._engine = self.token_cache = self.sink = None
        self.state = "unloaded"

    def answer_closed(self, answer: AnswerStream) -> None:
        """Forget an answer that is complete, or whose client is gone. May be called twice."""
        self.answers.discard(answer)
        if self.on_answer_closed is not None:
            self.on_answer_closed()

    def with_adapter(self, name: str, adapter: LoadedAdapter) -> ServedModel:
        """The model as one request sees it: under this name, computed with the adapter. All else is shared."""
        seen = copy.copy(self)
        seen.names, seen.adapter = (name,), adapter
        return seen

    @property
    def adapters(self) -> dict[str, ListedAdapter]:
        """Adapters that requests may name; empty while the model is not loaded."""
        return {} if self._engine is None else {each.name: each for each in self._engine.adapters.known()}

    def adapter_named(self, name: str | None) -> str | None:
        """The adapter of a request for `name`, also written BASE:ADAPTER as for SGLang; None: it names none."""
        if name is None or name in self.names:
            return None
        known = self.adapters
        base, _, last = name.rpartition(":")
        return name if name in known else last if base in self.names and last in known else None

    @property
    def loaded_engine(self) -> ServingEngine | None:
        return self._engine

    @property
    def engine(self) -> ServingEngine:
        """The engine, for endpoints that need it. ApiError 503 while it loads or drains."""
        self.server.refuse_while_draining()
        return self.engine_while_draining

    @property
    def engine_while_draining(self) -> ServingEngine:
        """The engine, for queries that compute nothing. ApiError 503 while there is none."""
        if self._engine is not None:
            return self._engine
        if self.source is not None and self.state != "loading":
            why = f" ({self.problem})" if self.problem else ""
            raise unavailable(
                f"the model {self.name!r} is {self.state}{why}; a request for an answer loads it",
                "model_not_loaded",
                2,
            )
        raise unavailable("the model is still loading; /health tells when it is ready", "model_loading", 2)

    @property
    def tokenizer(self) -> ServingTokenizer:
        """The engine's tokenizer, bounded for texts that are too long. ApiError 503 as `engine`."""
        engine = self.engine
        bounded = BoundedTokenizer(engine.tokenizer, engine.max_context, engine.info.context_limit_reason)
        return cast(ServingTokenizer, bounded)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that its chat template reads; empty while it is not loaded."""
        return frozenset() if self._engine is None else self._engine.tokenizer.template_variables

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts may have pictures; False while it is not loaded."""
        return self._engine is not None and self._engine.pictures is not None

    @property
    def path(self) -> str:
        """Its directory or file."""
        return self.source.path if self.source is not None else self.engine_while_draining.info.model

    @property
    def name(self) -> str:
        """The first name, used in answers and records; empty before it is known."""
        return next(iter(self.names), "")


def _chat_marks(config: ServerConfig, engine: ServingEngine) -> ChatMarks:
    """Chat marks of the served model; --tool-call-parser and --reasoning-parser override them."""
    shown = chat_marks(engine.info.architecture, engine.tokenizer.chat_template)
    return chosen_marks(shown, config.tool_call_parser, config.reasoning_parser)
