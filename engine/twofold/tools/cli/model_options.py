"""Shared by subcommands that run a model: its flags, loading with a progress bar, sampling flags."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.api.config import DatabaseConfig, EngineConfig, TelemetryConfig
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.sampling_ranges import SAMPLING_RANGES, Range
from twofold.api.settings import add_arguments, flag_name, from_namespace, given_fields
from twofold.api.types import SamplingParams
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.flag_aliases import (
    GENERATION,
    GGUF_PATH,
    N_CPU_MOE,
    add_aliases,
    cpu_moe_ratio,
    gguf_model,
)
from twofold.tools.cli.hub.model_path import model_path, tokenizer_path
from twofold.tools.cli.number_options import within

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.experts.spread import RankShare
    from twofold.fit.plan import FitPlan
    from twofold.telemetry.sink import TelemetrySink


MAX_TOKENS: Final = Range(1, 2**31)
SAMPLING: Final[dict[str, tuple[Any, str]]] = {
    "temperature": (float, "sampling temperature; 0 is greedy"),
    "top_p": (float, "sample from the most likely tokens whose probabilities sum to this"),
    "top_k": (int, "sample from this many most likely tokens; 0: all"),
    "min_p": (float, "exclude tokens less likely than this share of the most likely one"),
    "max_tokens": (int, "longest answer in tokens"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags of engine and telemetry."""
    from twofold.experts.policies import SERVING, described

    add_arguments(parser, EngineConfig, {"policy": described(SERVING)})
    add_arguments(parser, TelemetryConfig)
    add_aliases(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling (default: the model's generation_config.json)")
    for name, (parse, help_text) in SAMPLING.items():
        read = within(parse, SAMPLING_RANGES.get(name, MAX_TOKENS))
        group.add_argument(flag_name(name), dest=name, type=read, help=help_text, metavar=name.upper())
    add_aliases(parser, GENERATION)


def sampling_from(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the values of the flags."""
    given = {name: getattr(args, name) for name in SAMPLING}
    return dataclasses.replace(
        defaults, **{name: value for name, value in given.items() if value is not None}
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings, with the model's directory resolved. ConfigError, ModelLoadError."""
    from twofold.models.bundled import bundled_model_path

    config = from_namespace(EngineConfig, args)
    if hasattr(args, GGUF_PATH):
        tokenizer = config.tokenizer or _directory(config.model)
        model = gguf_model(Path(args.gguf_path).expanduser())
        config = dataclasses.replace(config, model=str(model), tokenizer=tokenizer)
    model = model_path(config.model, config.revision) if config.model else bundled_model_path()
    tokenizer = tokenizer_path(config.tokenizer) if config.tokenizer else None
    config = dataclasses.replace(config, model=str(model), tokenizer=tokenizer)
    if not hasattr(args, N_CPU_MOE):
        return config
    if config.moe_cache_mib is None:
        from twofold.models import open_model_files

        ratio = cpu_moe_ratio(args.n_cpu_moe, open_model_files(model).config.moe_layers)
        return dataclasses.replace(config, gpu_experts_ratio=ratio)
    if args.n_cpu_moe is not None:
        raise ConfigError(
            "--n-cpu-moe and --moe-cache-mib were both given; give --moe-cache-mib alone, for all experts on the GPU"
        )
    return config  # of -cmoe the cache is what lies on the GPU


def fitted(args: argparse.Namespace, config: EngineConfig) -> tuple[EngineConfig, FitPlan | None]:
    """`config` with what no flag sets chosen for this machine, and the plan; None with --no-auto-fit.

    Raises:
        ConfigError: the model does not fit; the table on stderr says what would.
    """
    if not config.auto_fit:
        return config, None
    # Imported here: other commands need neither.
    from twofold.fit.machine import fit_here
    from twofold.models import open_model_files

    given = set(given_fields(EngineConfig, args))
    if hasattr(args, N_CPU_MOE):
        given.add("gpu_experts_ratio")
    plan = fit_here(config, given, open_model_files(Path(config.model)))
    if not plan.fits:
        print("\n".join(plan.lines()), file=sys.stderr)
        raise ConfigError(f"{plan.problem}; --no-auto-fit tries nevertheless")
    return plan.config, plan


@contextlib.contextmanager
def report_lack_of_memory(plan: FitPlan | None) -> Iterator[None]:
    """If loading runs out of memory, print what would fit into the memory that is left now."""
    try:
        yield
    except (MemoryError, CapacityError):
        if plan is not None:
            print("\n".join(plan.lines()), *plan.lower(), sep="\n", file=sys.stderr)
        raise


def _directory(path: str) -> str | None:
    """`path` if it is a directory; None if it is unset or a model's name on a hub."""
    return path if path and Path(path).expanduser().is_dir() else None


def open_telemetry(args: argparse.Namespace) -> TelemetrySink | None:
    """The telemetry sink; None if disabled. ConfigError if a database or file cannot be written."""
    config = from_namespace(TelemetryConfig, args)
    sinks: list[TelemetrySink] = []
    if config.record_routing:
        from twofold.telemetry.routing import RoutingRecorder

        sinks.append(RoutingRecorder(config.record_routing))
    if (database := open_telemetry_database(config, text=config.telemetry_text)) is not None:
        sinks.append(database)
    if len(sinks) > 1:
        from twofold.telemetry.sink import TeeSink

        return TeeSink(*sinks)
    return sinks[0] if sinks else None


def open_telemetry_database(config: DatabaseConfig, *, text: bool = False) -> TelemetrySink | None:
    """The sink of the database; None if disabled. ConfigError if it cannot be written."""
    if not config.telemetry_url or config.telemetry == "off":
        return None
    from twofold.telemetry.sink import LEVELS, RunLabel
    from twofold.telemetry.writer import open_sink

    level = next(each for each in LEVELS if each == config.telemetry)
    sink = open_sink(config.telemetry_url, level=level, max_bytes=config.telemetry_max_bytes, text=text)
    sink.label = RunLabel(config.run_name, ",".join(config.run_tag))
    return sink


def load_engine(
    config: EngineConfig, sink: TelemetrySink | None, *, replica: str = "", share: RankShare | None = None
) -> Engine:
    """Load the engine, with a progress bar on a terminal's stderr. replica, share: as in `Engine.load`."""
    from twofold.engine import Engine

    with Bar("loading", "GB", 1e-9) as bar:
        return Engine.load(
            config,
            telemetry=sink,
            progress=lambda at: bar.show(at.bytes_done, at.bytes_total, at.stage),
            replica=replica,
            share=share,
        )


def load_started(config: EngineConfig, sink: TelemetrySink | None) -> Engine:
    """Load the engine and start it."""
    engine = load_engine(config, sink)
    engine.start()
    return engine


@contextlib.contextmanager
def running_engine(
    args: argparse.Namespace,
    config: EngineConfig,
    load: Callable[[EngineConfig, TelemetrySink | None], Engine] = load_started,
) -> Iterator[Engine]:
    """A started engine that records as the flags say; closed at the end. load: loads and starts it."""
    with contextlib.ExitStack() as closing:
        sink = open_telemetry(args)
        if sink is not None:
            closing.callback(sink.close)
        engine = load(config, sink)
        closing.callback(engine.close)
        yield engine


def emulation_notice(accelerator: str) -> str | None:
    """The notice that all times of this run are emulated; None on real hardware."""
    if not accelerator.startswith("emulated"):
        return None
    return (
        f"note: the GPU is emulated ({accelerator}). Uploads and evictions are real; the CPU computes, and GPU times "
        "come from the cost model, on a virtual clock. For real times: --accelerator none (the CPU alone, at full "
        "speed), or cuda."
    )
