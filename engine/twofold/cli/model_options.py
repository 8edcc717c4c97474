"""What the subcommands that run a model share: its flags, loading it with a progress bar, sampling flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.api.config import EngineConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.sampling_ranges import SAMPLING_RANGES, Range
from twofold.api.settings import add_arguments, from_namespace
from twofold.api.types import SamplingParams
from twofold.cli.bar import Bar
from twofold.cli.flag_aliases import N_CPU_MOE, add_aliases, cpu_moe_ratio

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.telemetry.sink import TelemetrySink


_SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0 always picks the likeliest token; higher is more varied"),
    "top_p": (float, "draw from the likeliest tokens that together have this probability"),
    "top_k": (int, "draw from this many likeliest tokens; 0: all"),
    "min_p": (float, "leave out tokens less likely than this share of the likeliest"),
    "max_tokens": (int, "longest answer in tokens"),
}
_RANGES = {**SAMPLING_RANGES, "max_tokens": Range(1, 2**31)}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the engine's flags and the telemetry's."""
    from twofold.experts.policies import SERVING, described

    add_arguments(parser, EngineConfig, {"policy": described(SERVING)})
    add_arguments(parser, TelemetryConfig)
    add_aliases(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("How to pick tokens (default: what the model's authors recommend)")
    for name, (_, help_text) in _SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, help=help_text, metavar=name.upper())


def sampling_from(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what the flags say. ConfigError for a value out of range."""
    changes: dict[str, Any] = {}
    for name, (parse, _) in _SAMPLING.items():
        text = getattr(args, name, None)
        if text is None:
            continue
        expected = f"a {'number' if parse is float else 'whole number'} from {_RANGES[name]}"
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not _RANGES[name].holds(value):
            raise ConfigError(f"--{name.replace('_', '-')} was given {text!r}; it takes {expected}")
        changes[name] = value
    return dataclasses.replace(defaults, **changes)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings with the model's directory filled in. ConfigError, ModelLoadError."""
    from twofold.models.bundled import bundled_model_path

    config = from_namespace(EngineConfig, args)
    model = Path(config.model or bundled_model_path()).expanduser()
    config = dataclasses.replace(config, model=str(model))
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


def open_telemetry(args: argparse.Namespace) -> TelemetrySink | None:
    """Where the run is recorded; None if nowhere. ConfigError if a database or file cannot be written."""
    config = from_namespace(TelemetryConfig, args)
    sinks: list[TelemetrySink] = []
    if config.record_routing:
        from twofold.telemetry.routing import RoutingRecorder

        sinks.append(RoutingRecorder(config.record_routing))
    if config.telemetry_url:
        from twofold.telemetry.writer import open_sink

        sinks.append(open_sink(config.telemetry_url, max_bytes=config.telemetry_max_bytes))
    if len(sinks) > 1:
        from twofold.telemetry.sink import TeeSink

        return TeeSink(*sinks)
    return sinks[0] if sinks else None


def load_engine(config: EngineConfig, sink: TelemetrySink | None) -> Engine:
    """The engine, loaded under a progress bar on a terminal's stderr."""
    from twofold.engine import Engine

    bar = Bar("loading", "GB", 1e-9)
    try:
        return Engine.load(
            config,
            telemetry=sink,
            progress=lambda at: bar.show(at.bytes_done, at.bytes_total, at.stage),
        )
    finally:
        bar.clear()


def emulation_notice(accelerator: str) -> str | None:
    """What a person must know before reading any time that this run prints."""
    if not accelerator.startswith("emulated"):
        return None
    return (
        f"note: the GPU is emulated ({accelerator}). Experts really move and are really evicted; the CPU computes "
        "and GPU times are the cost model's, on a virtual clock."
    )
