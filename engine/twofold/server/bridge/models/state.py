"""State of the application: the models it serves, and the phase of the process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from fastapi import Request

from twofold.api.config import ServerConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.types import SamplingParams
from twofold.api.valid_text import valid_text
from twofold.server.bridge.models.adapted_model import adapted
from twofold.server.bridge.models.model_manager import ModelManager
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.resources import ServerResources
from twofold.server.bridge.models.served_model import ModelSource, ServedModel
from twofold.server.http.bodies import LoraScale
from twofold.server.http.errors import ApiError, wrong_field
from twofold.telemetry.sink import TelemetrySink
from twofold.text.chat.marks import check_parsers
from twofold.weights.gguf_file import model_name

_ANY_NAME: Final = "*"
"""A served name that accepts any model name in requests."""


class ServerState(ServerResources):
    """State shared by all endpoints of one application; changed on the event loop only.

    It serves one model that its owner loads, or several that a `ModelManager` loads on demand.
    """

    def __init__(
        self,
        config: ServerConfig,
        sink: TelemetrySink | None,
        sources: Mapping[str, ModelSource] | None = None,
        limits: ModelsConfig | None = None,
    ) -> None:
        """sources: several models by name, the first is the default. limits: of models loaded at a time."""
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        super().__init__(config)
        self.sink = sink
        self.computing_paths: set[str] = set()
        """Paths of POST requests that a full server refuses before reading them; the routers add theirs."""
        named = tuple(name for name in self._given_names if name != _ANY_NAME)
        self.models: tuple[ServedModel, ...] = (ServedModel(self, named),)
        self.manager: ModelManager | None = None
        """Loads and unloads the models; None for a single model."""
        if sources is not None:
            self.models = tuple(ServedModel(self, (name,), source) for name, source in sources.items())
            self.manager = ModelManager(self.models, limits or ModelsConfig())
            self.phase = "ready"

    def ready(self, engine: ServingEngine, sampling_defaults: SamplingParams | None = None) -> None:
        """Enter the phase "ready": the single model's engine is loaded and takes requests from now on."""
        model = self.models[0]
        model.loaded(engine, sampling_defaults, self.sink)
        model.names = model.names or (model_name(engine.info.model),)
        if self.phase == "loading":
            self.phase = "ready"

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()
        super().close()

    @property
    def serving_phase(self) -> str:
        """The phase; "loading" while the single model, whose device failed, is loaded on the CPU, and "failed" if it
        cannot be served any more."""
        engine = self.default.loaded_engine
        failure = None if engine is None or self.manager is not None else engine.failure
        if self.phase != "ready" or failure is None or failure.state == "replaced":
            return self.phase
        return "loading" if failure.state == "reloading" else "failed"

    @property
    def loaded_models(self) -> list[ServedModel]:
        """Models with an engine, most recently used first."""
        found = [model for model in self.models if model.loaded_engine is not None]
        return sorted(found, key=lambda model: -model.last_used_s)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def max_context(self) -> int:
        """Longest context of a request that may be for any model. ApiError 503 if none can be served now."""
        if self.manager is None:
            return self.default.engine.max_context
        self.refuse_while_draining()
        return self.manager.max_context

    @property
    def context_limits(self) -> dict[str, tuple[int, str]]:
        """Longest context and what ends it before the model's own does ("": nothing), by the model that a request
        names ("": none). Models whose files were not read yet are missing."""
        if self.manager is None:
            return {"": (self.max_context, self.default.engine.info.context_limit_reason)}
        known = [(model, model.description) for model in self.models if model.description is not None]
        return {
            name: (about.max_context, about.limit_reason)
            for model, about in known
            for name in (*model.names, *([""] if model is self.default else []))
        }

    @property
    def listed(self) -> list[tuple[ServedModel, str]]:
        """All models, once per name: their own, then those of their adapters."""
        return [(model, name) for model in self.models for name in (*model.names, *model.adapters)]

    def find(self, name: str | None) -> ServedModel:
        """The model of this name or of the adapter with this name; None means the default. ApiError 404 for an unknown
        name, unless any is accepted."""
        if name is None or _ANY_NAME in self._given_names:
            return self.default
        for model in self.models:
            if name in model.names or model.adapter_named(name) is not None:
                return model
        served = ", ".join(repr(each) for _, each in self.listed)
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist here; this server serves {served}; "
            + (
                f"--served-model-name gives it more names, and --served-model-name '{_ANY_NAME}' any name"
                if self.manager is None
                else "start it with further models to serve more"
            ),
            param="model",
            code="model_not_found",
        )

    def queried(self, request: Request) -> ServedModel:
        """The model that a query's `?model=` names, else the one used last. ApiError 404 for an unknown name."""
        name = request.query_params.get("model")
        return self.find(name) if name else next(iter(self.loaded_models), self.default)

    @contextlib.asynccontextmanager
    async def using(
        self, name: str | None, keep_alive_s: float | None = None, *, lora: Sequence[LoraScale] | None = None
    ) -> AsyncIterator[ServedModel]:
        """The model of a request with its adapters, loaded, and not unloaded inside the block. Waits while it loads.

        Args:
            keep_alive_s: how long it stays loaded after this request if nothing else needs the memory; inf: for ever.
            lora: the request's adapters with their scales, in place of one that `name` means.

        Raises:
            ApiError: 404 for an unknown name, 429 if too many requests wait, 503 if it cannot be loaded or used now.
        """
        model = self.find(name)
        if self.manager is None:
            async with adapted(model, name, lora) as seen:
                yield seen
            return
        if lora:
            raise wrong_field("lora", "adapters are served beside one model, and this server has several")
        self.refuse_while_draining()
        async with self.manager.holding(model, keep_alive_s):
            yield model

    @cached_property
    def _given_names(self) -> tuple[str, ...]:
        """The names of --served-model-name, without duplicates."""
        given = valid_text(",".join(self.config.served_model_name))
        return tuple(dict.fromkeys(name.strip() for name in given.split(","))) if given else ()
