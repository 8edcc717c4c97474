"""`twofold serve --ray`, and the application that a cluster's serve.yaml names."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold import __version__
from twofold.api.addresses import without_password
from twofold.api.config import ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.fleet_config import FleetConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import flag_name, from_namespace
from twofold.api.types import SamplingParams
from twofold.tools.cli.logs import set_up_server_log
from twofold.tools.cli.model_options import engine_config, fitted, load_engine, open_telemetry
from twofold.tools.cli.serve.greeting import addresses
from twofold.tools.cli.serve.ray_session import end_application, ray_session
from twofold.tools.cli.serve.several import SeveralModels, open_several

if TYPE_CHECKING:
    from ray.serve import Application

    from twofold.server.bridge.models.protocol import ServingEngine
    from twofold.server.bridge.models.state import ServerState
    from twofold.telemetry.sink import TelemetrySink

APPLICATION: Final = "twofold"
"""Name of the application in Ray Serve."""


@dataclass
class LoadedReplica:
    """One replica's engine and telemetry."""

    engine: ServingEngine
    sampling_defaults: SamplingParams | None
    sink: TelemetrySink | None
    close_engine: Callable[[], None]

    def state(self, config: ServerConfig) -> ServerState:
        from twofold.server.bridge.models.state import ServerState

        state = ServerState(config, self.sink)
        state.ready(self.engine, self.sampling_defaults)
        return state

    def close(self) -> None:
        self.close_engine()
        if self.sink is not None:
            self.sink.close()


@dataclass(frozen=True)
class ReplicaLoader:
    """Loads a replica as `twofold ARGUMENTS` would, which begin with `serve`. Pickled to the replica's process."""

    arguments: tuple[str, ...]
    version: str = __version__
    """The fleet's version of Twofold."""
    mark: str = ""
    """The `model_mark` of the fleet's model; empty if unknown."""

    def __call__(self, replica: str) -> LoadedReplica | SeveralModels:
        """The loaded replica of this id. ConfigError, before anything is loaded, if it differs from the fleet's."""
        from twofold.server.bridge.models.sampling_defaults import sampling_defaults

        self._check_version()
        args = serve_arguments(self.arguments)
        set_up_server_log(debug=args.debug, form=from_namespace(ServerConfig, args).log_format)
        if from_namespace(ModelsConfig, args).is_used:
            return open_several(args, replica)
        config = engine_config(args)
        self._check_model(config.model)
        config, _ = fitted(args, config)
        sink = open_telemetry(args)
        engine = load_engine(config, sink, replica=replica)
        engine.start()
        defaults = dataclasses.replace(sampling_defaults(Path(config.model)), seed=config.seed)
        return LoadedReplica(engine, defaults, sink, close_engine=engine.close)

    def _check_version(self) -> None:
        if __version__ != self.version:
            raise ConfigError(
                f"a replica on {platform.node()} has Twofold {__version__}, the fleet has {self.version}; install "
                f"{self.version} there"
            )

    def _check_model(self, model: str) -> None:
        if self.mark and (found := _mark(model)) != self.mark:
            raise ConfigError(
                f"{model} on {platform.node()} is another model (mark {found}) than the fleet's (mark {self.mark}); "
                "copy the same files to every machine"
            )


def _mark(model: str) -> str:
    from twofold.models import open_model_files
    from twofold.models.model_mark import model_mark

    return model_mark(open_model_files(Path(model)))


def serve_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments of a command line that begins with `serve`."""
    from twofold.tools.cli.main import build_parser

    return build_parser("serve").parse_args(list(arguments))


def build(settings: Mapping[str, Any]) -> Application:
    """The application of a serve.yaml; `settings` are the flags of `twofold serve`, with underscores.

    Raises:
        ConfigError: a value is out of range.
    """
    arguments = ("serve", *_as_arguments(settings))
    args = serve_arguments(arguments)
    _refuse_ranks(args)
    from twofold.server.fleet.deployment import application

    server, fleet = from_namespace(ServerConfig, args), from_namespace(FleetConfig, args)
    return application(ReplicaLoader(arguments), server, fleet)


def run_fleet(args: argparse.Namespace) -> int:
    """Serve until a signal; then running answers finish. `args.given_arguments` goes to every replica."""
    _refuse_ranks(args)
    try:
        import ray.serve
    except ImportError as error:
        raise ConfigError(
            f"--ray was given, but Ray Serve cannot be imported ({error}); install it: pip install 'twofold[ray]'"
        ) from None
    from twofold.server.fleet.deployment import application
    from twofold.server.listening import bind, certificate_of, url_of

    server, fleet = from_namespace(ServerConfig, args), from_namespace(FleetConfig, args)
    certificate_of(server)
    # Closed before the gateways share the address; another program that listens there is refused here.
    with bind(server) as listener:
        url = f"{url_of(server, listener)}/v1"
        server = dataclasses.replace(server, port=listener.getsockname()[1])
    # An error in the model, a setting or the store is one line here, not a traceback of each replica.
    if from_namespace(ModelsConfig, args).is_used:
        open_several(args).close()
        mark = ""
    else:
        mark = _mark(engine_config(args).model)
    check_store(from_namespace(TelemetryConfig, args), fleet)
    with ray_session(fleet.ray_address):
        ends = _end_event()  # Ray has just set handlers of its own
        loader = ReplicaLoader(args.given_arguments, mark=mark)
        run_application(application(loader, server, fleet, ray.util.get_node_ip_address()))
        print(
            f"Twofold is ready\n  replicas     {fleet.num_replicas} on Ray Serve\n  API          {addresses(url)}",
            flush=True,
        )
        ends.wait()
        print("stopping: running answers may finish; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        end_application(APPLICATION)
    return 0


def _end_event() -> threading.Event:
    """An event that the first SIGTERM or Ctrl-C sets. The next one raises KeyboardInterrupt."""
    ends = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if ends.is_set():
            raise KeyboardInterrupt
        ends.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return ends


def _refuse_ranks(args: argparse.Namespace) -> None:
    size = from_namespace(ParallelConfig, args).tensor_parallel_size
    if size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {size} was given with --ray, whose replicas each hold the whole model; leave "
            "one of the two out"
        )


def check_store(telemetry: TelemetryConfig, fleet: FleetConfig) -> None:
    """ConfigError if the replicas cannot all write to the telemetry database."""
    if not telemetry.telemetry_url or telemetry.telemetry == "off":
        return
    from twofold.telemetry.writer import open_sink

    most = fleet.max_replicas or fleet.num_replicas
    if most > 1 and not telemetry.telemetry_url.startswith("postgresql"):
        raise ConfigError(
            f"--telemetry-url {without_password(telemetry.telemetry_url)} was given with {most} replicas; they need "
            "PostgreSQL (postgresql+psycopg://…), because a SQLite file has one writer"
        )
    open_sink(telemetry.telemetry_url).close()


def run_application(app: Application) -> None:
    """Run the application of a fleet. ConfigError with the first replica's reason, and nothing left running, if the
    replicas cannot start."""
    from ray import serve

    try:
        serve.run(app, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        found = serve.status().applications.get(APPLICATION)
        deployments = [] if found is None else list(found.deployments.values())
        end_application(APPLICATION)
        messages = "\n".join([*(each.message for each in deployments), str(error)])
        reasons = re.findall(r"^\S*Error: (.+)$", messages, re.MULTILINE)
        reason = reasons[-1] if reasons else messages.strip().splitlines()[-1]
        raise ConfigError(f"no replica could start: {reason}") from None


def _as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """{"model": "m", "ray": True, "api_key": ["a", "b"]} → ["m", "--ray", "--api-key", "a", "--api-key", "b"]"""
    arguments = [str(settings["model"])] if "model" in settings else []
    arguments += map(str, settings.get("models", ()))
    for name, value in settings.items():
        if name in ("model", "models"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                arguments.append(flag_name(name))
            elif each is False:
                arguments.append(flag_name(f"no_{name}"))
            else:
                arguments += [flag_name(name), str(each)]
    return arguments
