"""Commands with --tensor-parallel-size N: rank 0, which runs the command, beside the other ranks."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import add_arguments, from_namespace
from twofold.tools.cli.flag_aliases import RANKS, add_aliases
from twofold.tools.cli.model_options import engine_config, load_engine

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.parallel.session import Leader
    from twofold.telemetry.sink import TelemetrySink

_log = logging.getLogger("twofold.ranks")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ranks, also as other engines name them."""
    add_arguments(parser, ParallelConfig)
    add_aliases(parser, RANKS)


def run_on_ranks(args: argparse.Namespace, lead: Callable[[Leader], int]) -> int:
    """Run `lead` on rank 0 while this process, or the others that it starts, are its other ranks. Raises as
    `run_rank`."""
    # Before torch is imported: its native lines repeat with stacks what becomes one error here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from twofold.parallel.session import run_rank

    return run_rank(engine_config(args), from_namespace(ParallelConfig, args), args.given_arguments, lead)


def load_on_ranks(
    config: EngineConfig,
    sink: TelemetrySink | None,
    leader: Leader,
    on_lost: Callable[[], None] = lambda: None,
) -> Engine:
    """Load rank 0, wait for the others and start the engine.

    on_lost: called on a thread when a rank is lost, after the reason was logged; every later step fails with it.

    Raises as `Leader.start` and `Engine.load`.
    """
    from twofold.parallel.session import rank_config

    def lost(reason: str) -> None:
        _log.error("%s", reason)
        on_lost()

    with leader.meeting.loading():
        engine = load_engine(rank_config(config), sink, share=leader.share)
    try:
        leader.start(leader.share.num_bytes + engine.runner.moe.store.bytes, lost)
    except BaseException:
        engine.close()
        raise
    engine.start()
    return engine
