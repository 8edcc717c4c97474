"""Memory, CPU time and open files of this process for /metrics, by the names of Prometheus' client libraries."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from twofold.server.bridge.observe.metrics import Gauge

_PROC = Path("/proc/self")


def process_rows() -> list[Gauge]:
    """The process's figures; empty on a system without /proc."""
    try:
        # After the name, which may contain spaces and parentheses.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        num_files = len(os.listdir(_PROC / "fd"))
        booted_s = int(Path("/proc/stat").read_text().split("\nbtime ")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return []
    ticks = os.sysconf("SC_CLK_TCK")
    user, system, start, virtual, resident = (int(fields[at]) for at in (11, 12, 19, 20, 21))
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("process_cpu_seconds_total", "CPU time of the server process, seconds.", (user + system) / ticks),
        (
            "process_resident_memory_bytes",
            "Physical memory of the server process.",
            resident * os.sysconf("SC_PAGE_SIZE"),
        ),
        ("process_virtual_memory_bytes", "Virtual memory of the server process.", virtual),
        ("process_start_time_seconds", "Unix time at which the process started.", booted_s + start / ticks),
        ("process_open_fds", "Open file descriptors.", num_files),
        ("process_max_fds", "Limit of open file descriptors.", most_files),
    ]
