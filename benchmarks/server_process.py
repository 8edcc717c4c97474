"""`twofold serve` of some checkout as a child process: started, found by the port it chose, watched, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 120.0
# An editable installation's finder is an instance among classes and would win over any path: it names its own checkout.
OF_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path.insert(0, sys.argv.pop(1))
from twofold.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests."""

    pid: int
    port: int

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextlib.contextmanager
def serving(checkout: Path, arguments: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """A server from the sources and the native module of `checkout`, on a free port, until the block ends.

    Raises:
        RuntimeError: it did not become ready; the message ends with what it printed.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TWOFOLD_")}
    command = [
        sys.executable,
        "-c",
        OF_CHECKOUT,
        str(checkout / "engine"),
        "serve",
        "--port",
        "0",
        *arguments,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=checkout
        )
    try:
        yield ServerProcess(process.pid, _wait_for_port(process, log))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"API\s+http://[^\s/]+:(\d+)/v1", log.read_text())
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"the server of {process.args!r} did not become ready: {log.read_text()[-2000:]}")
