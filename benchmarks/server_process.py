"""`twofold serve` of some checkout as a child process, and what it takes of the machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from twofold.tools.loadgen import server_process
from twofold.tools.loadgen.server_process import ServerProcess

START_TIMEOUT_S = 120.0
# An editable installation's finder is an instance among classes and would win over any path: it names its own checkout.
OF_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path.insert(0, sys.argv.pop(1))
from twofold.tools.cli.main import main
sys.exit(main())
"""


def resident_bytes(server: ServerProcess) -> int:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def num_threads(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


@contextlib.contextmanager
def serving(checkout: Path, arguments: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """A server from the sources and the native module of `checkout`, on a free port, until the block ends.

    Raises:
        ConfigError: it did not become ready; the message ends with what it printed.
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
    with server_process.serving(
        command, log, timeout_s=START_TIMEOUT_S, environment=environment, folder=checkout
    ) as server:
        yield server
