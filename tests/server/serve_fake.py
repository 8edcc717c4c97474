"""Runs `ServerProcess` around the fake engine, for tests that send signals to a process.

Arguments: drain timeout in seconds, then any of: hold (answers stand still until SIGUSR1), load-forever, load-fails.
Prints "listening PORT", then "ready" and "draining N"; exit code 2 for an error.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from fake_engine import FakeEngine
from twofold.config import ServerConfig
from twofold.errors import ModelLoadError, TwofoldError
from twofold.server.listening import bind
from twofold.server.process import ServerProcess


def main(drain_timeout_s: float, modes: list[str]) -> int:
    engine = FakeEngine()
    if "hold" in modes:
        engine.hold.clear()
    signal.signal(signal.SIGUSR1, lambda *_: engine.hold.set())
    config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s)
    listener = bind(config)
    print("listening", listener.getsockname()[1], flush=True)

    def load() -> tuple[Any, None]:
        if "load-forever" in modes:
            threading.Event().wait()
        if "load-fails" in modes:
            raise ModelLoadError("model.safetensors is damaged")
        return engine, None

    process = ServerProcess(
        config,
        None,
        load,
        on_ready=lambda _: print("ready", flush=True),
        on_drain=lambda number: print("draining", number, flush=True),
    )
    try:
        process.run(listener)
    except TwofoldError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
