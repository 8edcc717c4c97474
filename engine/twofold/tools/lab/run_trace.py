"""Traces of recorded runs: reads the routing of a telemetry database as `lab record` writes it to a file."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from twofold.api.errors import ConfigError
from twofold.api.types import TraceSizes
from twofold.tools.lab.trace import Trace, load_trace, make_trace

if TYPE_CHECKING:
    from twofold.telemetry import queries  # needs the extra `telemetry`, which files do not

DEFAULT_TOKENS: Final = 5_000
"""Latest tokens that are read of a run: about 1 s for 48 layers."""


def trace_of(routing: queries.RecordedRouting, run: queries.Run) -> Trace:
    """The recorded tokens as a trace. ConfigError if there are none, or an expert was routed twice by one token."""
    from twofold.telemetry import queries

    trace = make_trace(
        PurePath(run.model).name, routing.ids, routing.weights, routing.offsets, routing.num_experts
    )
    sizes = queries.model_sizes(run)
    return dataclasses.replace(trace, sizes=TraceSizes(*sizes) if sizes else None)


def run_trace(url: str, run_id: int | None = None, max_tokens: int = DEFAULT_TOKENS) -> Trace:
    """The latest decode tokens of a run, of the last one by default.

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
    return trace_of(routing, run)


def traces_of(args: argparse.Namespace) -> Iterator[Trace]:
    """The traces that the arguments name: npz files, and runs of telemetry URLs."""
    for source in args.traces:
        if "://" in source:
            yield run_trace(source, args.run, args.last_tokens)
        else:
            yield load_trace(source, args.num_experts)
