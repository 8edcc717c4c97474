"""Available host memory, as the kernel reports it; reserves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Available host memory: the kernel's MemAvailable, limited by the container."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = "".join(_lines(_CGROUP / "memory.max")).strip()
    if limit.isdigit():
        used = int("".join(_lines(_CGROUP / "memory.current")).strip() or 0)
        # Cached file pages count as used but are freed on demand.
        cached = sum(
            int(line.split()[1])
            for line in _lines(_CGROUP / "memory.stat")
            if line.startswith("inactive_file ")
        )
        available = min(available, int(limit) - used + cached)
    return max(0, available)


def _lines(path: Path) -> list[str]:
    """The lines of a kernel file; empty if it does not exist."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
