"""A server as a child process: starts it, finds its port, ends it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.errors import ConfigError

_END_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that is ready for requests."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    new_session: bool = False,
    while_waiting: Callable[[], object] = lambda: None,
) -> Iterator[ServerProcess]:
    """Run `command`, a form of `twofold serve --port 0`, until the block ends.

    Args:
        log: receives all its output.
        timeout_s: limit for loading its model.
        new_session: isolate it from the terminal's signals.
        while_waiting: called repeatedly until it is ready.

    Raises:
        ConfigError: it did not become ready; the message ends with its output.
    """
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  the caller's own command
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=new_session,
        )
    try:
        yield ServerProcess(process.pid, _wait_for_port(process, log, timeout_s, while_waiting))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(
    process: subprocess.Popen[bytes], log: Path, timeout_s: float, while_waiting: Callable[[], object]
) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"API\s+http://[^\s/]+:(\d+)/v1", log.read_text(errors="replace"))
        if found:
            return int(found[1])
        while_waiting()
        time.sleep(0.05)
    what = "did not become ready" if process.poll() is None else f"ended with code {process.returncode}"
    raise ConfigError(f"the server {what}: {log.read_text(errors='replace')[-2000:].strip()}")
