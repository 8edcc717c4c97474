"""`twofold serve --tensor-parallel-size N`: loading rank 0 beside the other ranks."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from twofold.api.config import EngineConfig
from twofold.tools.cli.model_options import load_engine

if TYPE_CHECKING:
    from twofold.engine import Engine
    from twofold.parallel.session import Leader
    from twofold.telemetry.sink import TelemetrySink

_log = logging.getLogger("twofold.serve")


def load_on_ranks(config: EngineConfig, sink: TelemetrySink | None, leader: Leader) -> Engine:
    """Load rank 0 and wait for the others; then the engine is started. When a rank is lost, the server ends.

    Raises as `Leader.start` and `Engine.load`.
    """
    from twofold.parallel.session import rank_config

    with leader.meeting.loading():
        engine = load_engine(rank_config(config), sink, share=leader.share)
    try:
        leader.start(leader.share.num_bytes + engine.expert_bytes, _end_server)
    except BaseException:
        engine.close()
        raise
    engine.start()
    return engine


def _end_server(reason: str) -> None:
    """Drain as after a first Ctrl-C: running requests fail at their next step."""
    _log.error("%s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
