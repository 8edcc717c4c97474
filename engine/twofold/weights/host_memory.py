"""Host memory as the kernel reports it: available, and of this process; reserves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from twofold import _core

_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file "),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)
"""Limit, use, and the row of memory.stat with cached file pages, in cgroups of version 2 and 1."""


def available_memory_bytes(root: str = "") -> int:
    """Available host memory: the kernel's MemAvailable, limited by each of the process's cgroups.

    root: is put before /sys and /proc, for tests.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path(f"{root}/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _core.cgroup_folders("memory", root):
        for limit, used, cached in _FILES:
            most = _number(Path(folder, limit))
            if most is not None:
                # Cached file pages count as used but are freed on demand.
                rows = _lines(Path(folder, "memory.stat"))
                freed = sum(int(row.split()[1]) for row in rows if row.startswith(cached))
                available = min(available, most - (_number(Path(folder, used)) or 0) + freed)
    return max(0, available)


def resident_bytes() -> int:
    """Memory of this process in RAM, pages of mapped files included."""
    rows = _lines(Path("/proc/self/statm"))
    return int(rows[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if rows else 0


def _number(path: Path) -> int | None:
    """The number in a kernel file; None without one ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """The lines of a kernel file; empty if it does not exist."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
