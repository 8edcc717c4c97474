"""Runs `ServerProcess` around the fake engine, for tests that send signals to a process.

Arguments: drain timeout in seconds, then any of: hold (answers stand still until SIGUSR1), load-forever, load-fails,
blocked-stdout (the words about the drain never get out).
Prints "listening PORT", then "ready" and "draining N"; exit code 2 for an error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from fake_engine import FakeEngine
from twofold.api.config import ServerConfig
from twofold.api.errors import ModelLoadError, TwofoldError
from twofold.server.bridge.models.state import ServerState
from twofold.server.listening import bind
from twofold.server.process import ServerProcess


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(drain_timeout_s: float, modes: list[str]) -> int:
    engine = FakeEngine()
    if "hold" in modes:
        engine.hold.clear()
    signal.signal(signal.SIGUSR1, lambda *_: engine.hold.set())
    config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s)
    listener = bind(config)
    say("listening", listener.getsockname()[1])

    def load() -> tuple[Any, None]:
        if "load-forever" in modes:
            threading.Event().wait()
        if "load-fails" in modes:
            raise ModelLoadError("model.safetensors is damaged")
        return engine, None

    def report_drain(number: int) -> None:
        if "blocked-stdout" in modes:
            threading.Event().wait()
        say("draining", number)

    process = ServerProcess(
        ServerState(config, None), load, on_ready=lambda: say("ready"), on_drain=report_drain
    )
    try:
        process.run(listener)
    except TwofoldError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
