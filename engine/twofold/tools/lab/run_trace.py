"""Traces of recorded runs, as `lab record` writes them to a file, with the run's model, machine and upload price."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.types import TraceSizes
from twofold.experts.profiles import COST_FIGURES, Figure, MachineProfile, load_profile, shipped_profiles
from twofold.tools.lab.shapes import SHAPES, ModelShape
from twofold.tools.lab.trace import Trace, load_trace, make_trace

if TYPE_CHECKING:
    from twofold.telemetry import queries  # needs the extra `telemetry`, which files do not

DEFAULT_TOKENS: Final = 5_000
"""Latest tokens that are read of a run: about 1 s for 48 layers."""
OWN_MACHINE: Final = "run"
"""As a profile: the machine that a telemetry URL's run was planned with."""


def trace_of(routing: queries.RecordedRouting, run: queries.Run) -> Trace:
    """The recorded tokens as a trace. ConfigError if there are none, or an expert was routed twice by one token."""
    from twofold.telemetry import queries

    trace = make_trace(
        PurePath(run.model).name, routing.ids, routing.weights, routing.offsets, routing.num_experts
    )
    sizes = queries.model_sizes(run)
    return dataclasses.replace(trace, sizes=TraceSizes(*sizes) if sizes else None)


def shape_of(run: queries.Run) -> ModelShape | None:
    """Sizes of the run's model, from its own row, else from a known model of this name; None if unknown."""
    from twofold.telemetry import queries

    sizes = queries.model_sizes(run)
    routing = (run.num_layers, run.num_experts, run.top_k)
    name = PurePath(run.model).name
    if sizes:
        return ModelShape(name, *TraceSizes(*sizes), routing=routing)
    known = SHAPES.get(name.lower())
    return known if known is not None and known.routing == routing else None


def machine_of(run: queries.Run) -> MachineProfile | None:
    """The profile that the run was planned with; None if unknown."""
    from twofold.telemetry import queries

    costs = queries.run_costs(run)
    if costs is not None and all(name in costs.figures for name in COST_FIGURES):
        figures = {name: Figure(costs.figures[name], "recorded with the run") for name in COST_FIGURES}
        return MachineProfile(costs.machine, "this run's machine", figures)
    kind, _, name = run.accelerator.partition(":")
    return load_profile(name) if kind == "emulated" and name in shipped_profiles() else None


def price_of(run: queries.Run) -> float | None:
    """Price of one upload in misses, as the run's scheduler had it; None where its machine or model is unknown."""
    shape, machine = shape_of(run), machine_of(run)
    if shape is None or machine is None:
        return None
    return float(_core.default_upload_price(shape.cost_model(machine)))


def recorded(
    url: str, run_id: int | None = None, max_tokens: int = DEFAULT_TOKENS
) -> tuple[Trace, queries.Run]:
    """The latest decode tokens of a run, of the last one by default, and the run.

    ConfigError if there is no such run, it has no routing recorded, or it decoded no token.
    """
    from twofold.telemetry import queries

    if max_tokens < 1:
        raise ConfigError(f"--last-tokens is {max_tokens}; expected 1 or more")
    db = queries.open_database(url)
    run = queries.find_run(db, run_id)
    if missing := queries.needs_level(run, "expert"):
        raise ConfigError(f"telemetry database {db.path}, run {run.run_id}: {missing}")
    span = queries.window(run)
    rows = queries.layer_rows(db, run, span, max_rows=max_tokens * max(1, run.num_layers))
    routing = queries.recorded_routing(rows)
    if not routing.num_tokens:
        raise ConfigError(
            f"telemetry database {db.path}, run {run.run_id}: no decode token among its latest {max_tokens:,} tokens; "
            "send a request, give another --run or more --last-tokens"
        )
    return trace_of(routing, run), run


@dataclass(frozen=True)
class Source:
    """A trace that the arguments name, and what is known of the run that it was read of; None for a file."""

    trace: Trace
    price: float | None = None
    """Price of one upload in misses, as the run had it."""
    machine: MachineProfile | None = None

    def profile(self, name: str) -> MachineProfile:
        """The profile of this name; OWN_MACHINE is the run's. ConfigError if that is unknown."""
        if name != OWN_MACHINE:
            return load_profile(name)
        if self.machine is None:
            raise ConfigError(
                f"--profile {OWN_MACHINE} was given, but the machine of {self.trace.name} is not recorded; give a "
                f"telemetry URL of a calibrated run, or one of {', '.join(shipped_profiles())}"
            )
        return self.machine


def sources_of(args: argparse.Namespace) -> Iterator[Source]:
    """The traces that the arguments name."""
    for text in args.traces:
        yield source_of(text, num_experts=args.num_experts, run_id=args.run, max_tokens=args.last_tokens)


def source_of(
    text: str,
    *,
    num_experts: int | None = None,
    run_id: int | None = None,
    max_tokens: int = DEFAULT_TOKENS,
) -> Source:
    """A trace: an npz file's, or that of a telemetry URL's run; see `load_trace` and `recorded`."""
    if "://" not in text:
        return Source(load_trace(text, num_experts))
    trace, run = recorded(text, run_id, max_tokens)
    return Source(trace, price_of(run), machine_of(run))
