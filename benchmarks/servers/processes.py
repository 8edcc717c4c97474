"""`twofold serve` of some checkout as a child process, what it takes of the machine, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twofold.quantise.texts import default_text
from twofold.tools.loadgen import server_process
from twofold.tools.loadgen.generator import Load, LoadPlan
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.metrics import Run
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import CHAT, PromptShape, Workload

from benchmarks.scenario import ROOT, BenchmarkError

START_TIMEOUT_S = 300.0
# An editable installation's finder is an instance among classes and would win over any path: it names its own checkout.
OF_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path.insert(0, sys.argv.pop(1))
from twofold.tools.cli.main import main
sys.exit(main())
"""


def checkouts(against: Path | None) -> dict[str, Path]:
    """The checkouts that are measured in turn, by name."""
    return {"this": ROOT} | ({"other": against.resolve()} if against else {})


@contextlib.contextmanager
def serving(
    checkout: Path, flags: Sequence[str], log: Path, cores: Sequence[int] | None = None
) -> Iterator[ServerProcess]:
    """A server from the sources and the native module of `checkout`, on a free port, until the block ends.

    Args:
        cores: those that it runs on; None: all.

    Raises:
        ConfigError: it did not become ready; the message ends with what it printed.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TWOFOLD_")}
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    command = [sys.executable, "-c", OF_CHECKOUT, str(checkout / "engine"), "serve", "--port", "0", *flags]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if cores is None else cores)  # the child inherits it
    try:
        with server_process.serving(
            command, log, timeout_s=START_TIMEOUT_S, environment=environment, folder=checkout
        ) as server:
            os.sched_setaffinity(0, before)
            yield server
    finally:
        os.sched_setaffinity(0, before)


def resident_bytes(server: ServerProcess) -> int:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def num_threads(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def send(
    url: str, plan: LoadPlan, shape: PromptShape, *, greedy: bool = True, client: HttpClient | None = None
) -> Run:
    """Send chats of random words whose answers have exactly `shape.output_len` tokens. `plan.seed`: of the prompts."""
    extra: Mapping[str, Any] = {"ignore_eos": True} | ({"temperature": 0} if greedy else {})
    work = Workload(CHAT, "random", default_text().split(), extra, seed=plan.seed)
    return asyncio.run(Load(client or HttpClient(url), work, shape, plan).run())


def figures(run: Run) -> dict[str, Any]:
    """The run's figures. BenchmarkError if a request failed."""
    found = run.figures()
    if found["failed"]:
        raise BenchmarkError(f"answers failed: {found['errors']}")
    return found
