"""Ends Ray's processes with the command that started them.

Ray's agents report the loss of their raylet to a state store that has gone too, and wait 60 s for its answer. A command
that is killed cannot end them itself. So a small process holds a pidfd of each, and waits for the command's end. This
file is run by its path and imports nothing of Twofold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def ending_with_this_process(pids: Sequence[int]) -> Iterator[None]:
    """Kill these processes at the end of the block, or when this process ends before it, by SIGKILL too."""
    with contextlib.ExitStack() as held:
        handles = []
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                handles.append(os.pidfd_open(pid))
                held.callback(os.close, handles[-1])
        watcher = subprocess.Popen(  # noqa: S603  this file
            [sys.executable, "-I", "-S", __file__, *map(str, handles)],
            stdin=subprocess.PIPE,  # closed by the kernel when this process ends
            pass_fds=handles,
            start_new_session=True,  # Ctrl-C is for this process
        )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        watcher.stdin.close()
        watcher.wait()


def descendants(pid: int) -> list[int]:
    """Processes below this one, the nearest first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = children.get(pid, [])
    for each in found:
        found += children.get(each, [])
    return found


def _wait_and_kill(handles: Sequence[int]) -> None:
    """Kill the processes of these pidfds once standard input is closed."""
    sys.stdin.buffer.read()
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    _wait_and_kill([int(each) for each in sys.argv[1:]])
