"""`twofold serve`: an OpenAI-compatible server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.fleet_config import FleetConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import add_arguments as add_config_arguments
from twofold.api.settings import from_namespace
from twofold.tools.cli.flag_aliases import SERVER, add_aliases
from twofold.tools.cli.hub.model_path import served_name, served_names
from twofold.tools.cli.model_options import (
    add_model_arguments,
    engine_config,
    fitted,
    load_engine,
    open_telemetry,
    report_lack_of_memory,
)
from twofold.tools.cli.parser import ShortHelp
from twofold.tools.cli.serve.ranks import load_on_ranks, run_on_ranks

if TYPE_CHECKING:
    from twofold.api.types import SamplingParams
    from twofold.engine import Engine
    from twofold.fit.plan import FitPlan
    from twofold.parallel.session import Leader
    from twofold.server.bridge.models.protocol import ServingEngine
    from twofold.server.process import ServerProcess

_log = logging.getLogger("twofold.server")


SHORT_HELP: Final = ShortHelp(
    (
        *("--host", "--port", "--api-key", "--served-model-name"),
        *("--accelerator", "--gpu-experts-ratio", "--max-model-len", "--max-num-seqs", "--cpu-threads"),
        *("--speculative-config", "--telemetry-url", "--log-requests"),
    ),
    (
        ("serve", "the bundled demonstration model"),
        ("serve ~/models/Qwen3-30B-A3B --port 8000", "a model on disk"),
        ("serve ~/models/model.gguf --host 0.0.0.0 --api-key KEY", "for other machines"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServerConfig)
    add_config_arguments(parser, FleetConfig)
    add_config_arguments(parser, ParallelConfig)
    add_model_arguments(parser)
    add_config_arguments(parser, ModelsConfig)
    add_aliases(parser, SERVER)


def set_up_log(args: argparse.Namespace) -> None:
    """The server's log, in the form of --log-format."""
    from twofold.tools.cli.logs import set_up_server_log

    set_up_server_log(debug=args.debug, form=from_namespace(ServerConfig, args).log_format)


def run(args: argparse.Namespace) -> int:
    if from_namespace(FleetConfig, args).ray:
        from twofold.tools.cli.serve.fleet import run_fleet

        return run_fleet(args)
    from twofold.text.chat.marks import check_parsers

    # All checks that read no weights run first, before the server listens.
    server_config = from_namespace(ServerConfig, args)
    limits = from_namespace(ModelsConfig, args)
    check_parsers(server_config.tool_call_parser, server_config.reasoning_parser)
    if from_namespace(ParallelConfig, args).tensor_parallel_size > 1:
        if limits.is_used:
            raise ConfigError(
                "--tensor-parallel-size above 1 was given with several models; ranks share one model, so "
                "serve that alone"
            )
        return run_on_ranks(args, lambda leader: _run_single(args, server_config, leader))
    return _run_several(args, server_config) if limits.is_used else _run_single(args, server_config)


def _run_single(args: argparse.Namespace, server_config: ServerConfig, leader: Leader | None = None) -> int:
    """Serve one model. leader: rank 0, if other processes hold parts of the weights."""
    from twofold.server.bridge.models.sampling_defaults import sampling_defaults
    from twofold.server.bridge.models.state import ServerState
    from twofold.server.listening import bind, url_of
    from twofold.server.process import ServerProcess
    from twofold.tools.cli.serve.greeting import Server, greeting

    config = engine_config(args)
    if not server_config.served_model_name:
        requested = from_namespace(EngineConfig, args).model
        server_config = dataclasses.replace(server_config, served_model_name=served_names(requested))
    telemetry_url = from_namespace(TelemetryConfig, args).telemetry_url
    # The seed is logged here too: the choices of one request draw with consecutive seeds.
    defaults = dataclasses.replace(sampling_defaults(Path(config.model)), seed=config.seed)
    sink = open_telemetry(args)
    loaded: list[Engine] = []
    try:
        listener = bind(server_config)
        url = f"{url_of(server_config, listener)}/v1"

        def load() -> tuple[ServingEngine, SamplingParams]:
            if leader is not None:
                engine = load_on_ranks(config, sink, leader, on_lost=_end_server)
                loaded.append(engine)
                return engine, defaults
            chosen, plan = fitted(args, config)
            with report_lack_of_memory(plan):
                engine = load_engine(chosen, sink)
            if plan is not None:
                _show_plan(plan, server_config)
                engine.memory_advice = (*plan.lines(), *plan.lower())
            engine.start()
            loaded.append(engine)
            return engine, defaults

        def announce() -> None:
            engine = loaded[0]
            text = greeting(
                engine.info,
                state.default.name,
                Server(url, server_config, telemetry_url),
                config,
                can_chat=engine.tokenizer.has_chat_template,
            )
            _write_line(text if leader is None else f"{text}\n{leader.described()}")

        state = ServerState(server_config, sink)
        if taken := config.adapters.keys() & set(state.default.names or (served_name(config.model),)):
            raise ConfigError(
                f"--lora-modules: {min(taken)!r} is the model's own name; give the adapter another one"
            )
        process = ServerProcess(state, load, on_ready=announce, on_drain=_announce_drain)
        process.run(listener)
    finally:
        for engine in loaded:
            engine.close()
        if sink is not None:
            sink.close()
    return _end(process)


def _show_plan(plan: FitPlan, server_config: ServerConfig) -> None:
    """The chosen settings on standard error; one line of the log where that is JSON."""
    if server_config.log_format == "text":
        print("\n".join(plan.lines()), file=sys.stderr)
        return
    fields = {"event": "fit", "settings": {choice.flag: choice.value for choice in plan.choices}}
    _log.info("settings of this run", extra={"fields": fields})


def _end_server() -> None:
    """Drain as after a first Ctrl-C: running requests fail at their next step."""
    os.kill(os.getpid(), signal.SIGTERM)


def _run_several(args: argparse.Namespace, server_config: ServerConfig) -> int:
    from twofold.server.listening import bind, url_of
    from twofold.server.process import ServerProcess
    from twofold.tools.cli.serve.greeting import Server, models_greeting
    from twofold.tools.cli.serve.several import open_several

    telemetry, config = from_namespace(TelemetryConfig, args), from_namespace(EngineConfig, args)
    several = open_several(args)
    try:
        listener = bind(server_config)
        url = f"{url_of(server_config, listener)}/v1"
        state = several.state(server_config)

        def announce() -> None:
            server = Server(url, server_config, telemetry.telemetry_url)
            _write_line(models_greeting(list(several.sources), several.limits, server, config))

        process = ServerProcess(state, None, on_ready=announce, on_drain=_announce_drain)
        process.run(listener)
    finally:
        several.close()
    return _end(process)


def _end(process: ServerProcess) -> int:
    if process.is_still_loading:
        # Otherwise the interpreter would wait for native code of a model that is no longer needed.
        logging.shutdown()
        os._exit(0)
    return 0


def _announce_drain(num_running: int) -> None:
    answers = "1 running answer" if num_running == 1 else f"{num_running} running answers"
    _write_line(f"\nstopping: {answers} may finish, new requests are refused; Ctrl-C again stops at once")


def _write_line(text: str) -> None:
    """Print without sys.stdout: its buffer would raise a failed write again at interpreter exit, and its lock would be
    held by a print that never returns. Raises OSError when the reader has closed the pipe."""
    data = (text + "\n").encode(errors="replace")
    while data:
        data = data[os.write(1, data) :]
