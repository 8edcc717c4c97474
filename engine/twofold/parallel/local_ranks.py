"""The other ranks of this machine: starts their processes, watches them and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from twofold.parallel.place import Place

_ENDING_WAIT_S: Final = 1.0
"""Longest wait for the end of a process whose connection closed."""
_STOP_S: Final = 5.0


class LocalRanks:
    """Processes of the ranks after this one on this machine."""

    def __init__(self, arguments: Sequence[str], place: Place, port: int) -> None:
        """arguments: those of `twofold`, the same for every rank. port: where the ranks meet."""
        self._is_closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for local_rank in range(1, place.local_size):
            other = place.on_this_machine(local_rank, port)
            self._processes[other.rank] = subprocess.Popen(  # noqa: S603  the arguments of this process
                [sys.executable, "-m", "twofold.tools.cli", *arguments],
                env=os.environ | other.environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
            )

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on a thread, with the rank and how it ended, for each process that ends before `close`."""

        def wait(rank: int, process: subprocess.Popen[bytes]) -> None:
            process.wait()
            if not self._is_closing:
                on_end(f"rank {rank} was lost: {self.ending_of(rank)}; start all ranks again")

        for rank, process in self._processes.items():
            threading.Thread(
                target=wait, args=(rank, process), name=f"twofold-rank-{rank}", daemon=True
            ).start()

    def ending_of(self, rank: int) -> str | None:
        """How a rank's process ended; None: it runs, or is another machine's."""
        process = self._processes.get(rank)
        code = None if process is None else process.poll()
        if process is None or code is None:
            return None
        if code < 0:
            return f"process {process.pid} was ended by {signal.Signals(-code).name}"
        return f"process {process.pid} ended with code {code}"

    def ending_after_loss(self, rank: int) -> str | None:
        """The same, once its connection has closed: its process may still be ending."""
        process = self._processes.get(rank)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_WAIT_S)
        return self.ending_of(rank)

    def close(self) -> None:
        """Wait for the processes to end; those that do not are killed. Safe to call twice."""
        self._is_closing = True
        for process in self._processes.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def terminate(self) -> None:
        """End the processes at once, where they have no connection yet."""
        self._is_closing = True
        for process in self._processes.values():
            process.terminate()
        self.close()
