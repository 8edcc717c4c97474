"""The models of `twofold serve A B` and `--models-dir`: how each is found, measured and loaded on demand."""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, TwofoldError
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import given_fields
from twofold.api.types import SamplingParams
from twofold.models import open_model_files
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import WORKING_BYTES
from twofold.tools.cli.hub.model_path import served_name
from twofold.tools.cli.hub.models import find_models
from twofold.tools.cli.model_options import engine_config
from twofold.weights.host_memory import available_memory_bytes

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.engine.prefix.store import PrefixStore
    from twofold.fit.plan import Machine
    from twofold.server.bridge.models.protocol import ServingEngine
    from twofold.server.bridge.models.served_model import ModelDescription
    from twofold.telemetry.sink import TelemetrySink


@dataclass
class LoadedOnDemand:
    """A started engine; `close` ends it with its run in the telemetry."""

    engine: ServingEngine
    sampling_defaults: SamplingParams | None
    num_bytes: int
    sink: TelemetrySink | None
    owned: Engine

    def close(self) -> None:
        self.owned.close()
        if self.sink is not None:
            self.sink.close()


class SharedByModels:
    """Resources shared by the models of one server: memory, the prefix store, telemetry."""

    def __init__(
        self,
        limits: ModelsConfig,
        store: PrefixStore | None,
        open_sink: Callable[[], TelemetrySink | None],
        replica: str = "",
    ) -> None:
        """replica: id of this server in its fleet."""
        self.limits = limits
        self.replica = replica
        self.store = store
        self.open_sink = open_sink
        self.sources: list[OnDemandModel] = []
        self._machine: Machine | None = None

    def machine(self, config: EngineConfig, given: frozenset[str]) -> Machine:
        """This machine; its threads are measured once."""
        # Imported here: importing it takes torch's second where the first model is loaded anyway.
        from twofold.fit.machine import this_machine

        if self._machine is None:
            measures = config.auto_fit and "cpu_threads" not in given
            self._machine, _ = this_machine(config, measures_threads=measures)
        return self._machine

    def share(self, own: int) -> int:
        """Memory for the model whose weights take `own` bytes."""
        from twofold.fit.several import memory_share

        budget, most = self.limits.models_memory_bytes, self.limits.models_max
        assert budget is not None, "set at the start"
        weights = [size for source in self.sources if (size := source.known_weight_bytes()) is not None]
        return memory_share(own, weights, budget, most or None)


class OnDemandModel:
    """A `ModelSource`. Its methods run on the manager's thread, one at a time."""

    def __init__(self, config: EngineConfig, given: frozenset[str], shared: SharedByModels) -> None:
        self.path = config.model
        self._config, self._given, self._shared = config, given, shared
        self._weight_bytes: int | None = None

    def describe(self) -> ModelDescription:
        from twofold.server.bridge.models.served_model import ModelDescription
        from twofold.step.capacity import longest_request

        model = self._files().config
        longest = longest_request(self._config, model)
        return ModelDescription(model.architecture, longest, model.context_limit_reason)

    def required_bytes(self) -> int:
        return self._fit()[1]

    def load(self) -> LoadedOnDemand:
        from twofold.engine import Engine
        from twofold.server.bridge.models.sampling_defaults import sampling_defaults

        config, num_bytes = self._fit()
        defaults = dataclasses.replace(sampling_defaults(Path(self.path)), seed=config.seed)
        _free_memory()
        with contextlib.ExitStack() as on_error:
            sink = self._shared.open_sink()
            if sink is not None:
                on_error.callback(sink.close)
            shared = self._shared
            engine = Engine.load(config, telemetry=sink, prefix_store=shared.store, replica=shared.replica)
            engine.start()
            on_error.pop_all()
        gc.freeze()  # see `ServerProcess`; `_free_memory` looks at all again
        return LoadedOnDemand(engine, defaults, num_bytes, sink, engine)

    def known_weight_bytes(self) -> int | None:
        """Bytes of its weights; None for files that cannot be read."""
        from twofold.fit.several import weight_bytes

        if self._weight_bytes is None:
            with contextlib.suppress(TwofoldError, OSError):
                self._weight_bytes = weight_bytes(self._files())
        return self._weight_bytes

    def _files(self) -> ModelFiles:
        return open_model_files(Path(self.path), self._config.speculation.mtp_use)

    def _fit(self) -> tuple[EngineConfig, int]:
        from twofold.fit.several import fit_among_several, weight_bytes

        files = self._files()
        self._weight_bytes = weight_bytes(files)
        share = self._shared.share(self._weight_bytes)
        machine = self._shared.machine(self._config, self._given)
        return fit_among_several(self._config, self._given, files, machine, share)


def on_demand_models(args: argparse.Namespace, shared: SharedByModels) -> dict[str, OnDemandModel]:
    """The models that the command line names, by the names that clients use; the first is the default.

    Raises:
        ConfigError: there is none, or two have one name.
    """
    found: dict[str, OnDemandModel] = {}
    for text in _named(args, shared.limits):
        each = copy.copy(args)
        each.model = text
        config = engine_config(each)
        name = served_name(text)
        if name in found:
            raise ConfigError(
                f"{found[name].path} and {config.model} are both named {name!r}; rename a file or directory, as "
                "requests choose by the name"
            )
        found[name] = OnDemandModel(config, given_fields(EngineConfig, each), shared)
    shared.sources = list(found.values())
    return found


def _named(args: argparse.Namespace, limits: ModelsConfig) -> Iterator[str]:
    given = getattr(args, "model", None)
    if given:
        yield given
    yield from limits.models
    if limits.models_dir is not None:
        yield from map(str, find_models(Path(limits.models_dir).expanduser()))


def completed(limits: ModelsConfig, accelerator: str) -> ModelsConfig:
    """`limits` with the memory that is free now, and one model at a time where each fills an accelerator's memory."""
    if limits.models_memory_bytes is None:
        free = max(2**20, available_memory_bytes() - WORKING_BYTES)
        limits = dataclasses.replace(limits, models_memory_bytes=free)
    if limits.models_max is None:
        limits = dataclasses.replace(limits, models_max=4 if accelerator == "none" else 1)
    return limits


def _free_memory() -> None:
    """Return the memory of a model that was unloaded to the system: objects in cycles, and the allocator's lists."""
    gc.unfreeze()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
