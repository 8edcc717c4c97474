"""Resources shared by the models of one server, opened from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import from_namespace
from twofold.tools.cli.model_options import open_telemetry

if TYPE_CHECKING:
    from twofold.engine.prefix.store import PrefixStore
    from twofold.server.bridge.models.state import ServerState
    from twofold.telemetry.sink import TelemetrySink
    from twofold.tools.cli.hub.several_models import OnDemandModel


@dataclass
class SeveralModels:
    """Models that are loaded on demand, with their limits, telemetry and prefix store."""

    limits: ModelsConfig
    sources: dict[str, OnDemandModel]
    sink: TelemetrySink | None
    store: PrefixStore | None

    def state(self, config: ServerConfig) -> ServerState:
        """The state of a server with these models."""
        from twofold.server.bridge.models.state import ServerState

        return ServerState(config, self.sink, self.sources, self.limits)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.sink is not None:
            self.sink.close()


def open_several(args: argparse.Namespace, replica: str = "") -> SeveralModels:
    """The models that the arguments name, none of them loaded. `replica`: id in a fleet.

    Raises:
        ConfigError: a flag is for one model only, or the models or the telemetry cannot be used.
    """
    from twofold.device.finding import choose_accelerator, cuda_indices
    from twofold.engine.prefix.loading import open_store
    from twofold.tools.cli.hub.several_models import SharedByModels, completed, on_demand_models

    config = from_namespace(EngineConfig, args)
    for flag, is_given in (
        ("--served-model-name", from_namespace(ServerConfig, args).served_model_name),
        ("--record-routing", from_namespace(TelemetryConfig, args).record_routing),
        ("--cache-state", getattr(args, "cache_state", None)),
        ("--lora-modules", config.lora_modules),
        ("--lora-dir", config.lora_dir),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} was given with several models; it is for one model, so serve that alone"
            )
    choice, _ = choose_accelerator(config.accelerator, cuda_indices(config))
    limits = completed(from_namespace(ModelsConfig, args), choice.kind)
    sink = open_telemetry(args)
    several = SeveralModels(limits, {}, sink, open_store(config))
    try:
        shared = SharedByModels(
            limits, several.store, lambda: None if sink is None else sink.another_run(), replica
        )
        several.sources.update(on_demand_models(args, shared))
    except BaseException:
        several.close()
        raise
    return several
