"""Two network namespaces of Linux, joined by a cable of their own: machines for ranks, on one kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CABLE = "cable"
"""Name of both ends, each of which exists in its namespace only."""


@dataclass(frozen=True)
class Machine:
    """A namespace with its own loopback, and an address on the cable."""

    name: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """The command that runs others on it."""
        return ("ip", "netns", "exec", self.name)

    def pull_cable(self) -> None:
        """No packet comes or goes any more, and no connection is closed."""
        _ip("-n", self.name, "link", "set", _CABLE, "down")

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Sockets that this thread opens are on this machine meanwhile."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as home,
            Path("/run/netns", self.name).open("rb") as other,
        ):
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines. The host's own network stays as it is. The test is skipped where namespaces cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    machines = [Machine(f"twofold-{os.getpid()}-{end}", f"10.99.0.{1 + end}") for end in (0, 1)]
    with contextlib.ExitStack() as undo:
        try:
            for machine in machines:
                _ip("netns", "add", machine.name)
                undo.callback(_ip, "netns", "del", machine.name)
            near, far = (machine.name for machine in machines)
            _ip("link", "add", _CABLE, "netns", near, "type", "veth", "peer", "name", _CABLE, "netns", far)
            for machine in machines:
                _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", _CABLE)
                _ip("-n", machine.name, "link", "set", _CABLE, "up")
                _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("netns", "exec", machines[0].name, "true")
        except OSError as error:
            pytest.skip(f"this system makes no network namespaces: {error}")
        yield machines[0], machines[1]
