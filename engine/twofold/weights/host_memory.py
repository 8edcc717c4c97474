"""How much host memory can be taken now. Reads what the kernel tells; reserves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Host memory that can be taken now: what the kernel calls available, and no more than the container may."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = "".join(_lines(_CGROUP / "memory.max")).strip()
    if limit.isdigit():
        used = int("".join(_lines(_CGROUP / "memory.current")).strip() or 0)
        # Cached file pages count as used but are given back on demand.
        cached = sum(
            int(line.split()[1])
            for line in _lines(_CGROUP / "memory.stat")
            if line.startswith("inactive_file ")
        )
        available = min(available, int(limit) - used + cached)
    return max(0, available)


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel; none where there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
