"""Processes that Ray starts end with the command that started Ray, however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import twofold
from twofold.tools.cli.serve.orphans import descendants

from tests.e2e.ports import free_port

_FAILED_MS = 60_000
"""Wait after which a test fails."""
_COMMAND = '''
import os, subprocess, sys
from twofold.tools.cli.serve.orphans import descendants, ending_with_this_process
# A session leader below another process, as Ray's agents are below the raylet: no signal of ours reaches it.
below = """import subprocess, sys
agent = subprocess.Popen([sys.executable, '-c', 'input()'])
print(agent.pid, flush=True)
agent.wait()"""
raylet = subprocess.Popen([sys.executable, "-c", below], stdout=subprocess.PIPE, start_new_session=True, text=True)
agent = int(raylet.stdout.readline())
found = descendants(os.getpid())
assert found == [raylet.pid, agent], (found, raylet.pid, agent)
with ending_with_this_process(found):
    print(*found, flush=True)
    sys.stdin.readline()
'''


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(Path(twofold.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(_FAILED_MS), "the process goes on"


@pytest.mark.parametrize("is_killed", [True, False])
def test_processes_end_with_the_command(is_killed: bool) -> None:
    with started([sys.executable, "-c", _COMMAND]) as command:
        assert command.stdin is not None
        assert command.stdout is not None
        handles = [os.pidfd_open(int(word)) for word in command.stdout.readline().split()]
        assert len(handles) == 2
        if is_killed:
            command.kill()
        else:
            command.stdin.write("\n")
            command.stdin.flush()
        for handle in handles:
            wait_for_end(handle)
            os.close(handle)


@pytest.mark.slow
def test_agents_of_ray_end_with_a_killed_fleet() -> None:
    pytest.importorskip("ray", reason="needs twofold[ray]")
    port = str(free_port())
    flags = ["--ray", "--port", port, "--cpu-threads", "1", "--accelerator", "none"]
    with started([sys.executable, "-m", "twofold.tools.cli", "serve", *flags]) as fleet:
        assert fleet.stdout is not None
        assert any("is ready" in line for line in fleet.stdout)
        words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(fleet.pid)}
        handles = {pid: os.pidfd_open(pid) for pid in words}
        agents = [pid for pid, reply in words.items() if "Agent" in reply]
        watchers = [pid for pid, reply in words.items() if "orphans.py" in reply]
        assert (len(agents), len(watchers)) == (2, 1)
        os.kill(fleet.pid, signal.SIGKILL)
        wait_for_end(handles[watchers[0]])
        # The watcher has sent them SIGKILL. Without it they wait 60 s for Ray's state store.
        for pid in agents:
            wait_for_end(handles[pid])
    for handle in handles.values():
        os.close(handle)
