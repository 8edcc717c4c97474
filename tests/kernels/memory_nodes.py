"""A machine of two memory nodes, as the system's files describe it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="this process may use one CPU only")


def system(root: Path, nodes: dict[int, str], siblings: dict[int, str] | None = None) -> str:
    """A root with /sys of these nodes' CPU lists; every CPU is a core of its own unless `siblings` says so."""
    sys = root / "sys"
    for cpu in CPUS:
        folder = sys / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text((siblings or {}).get(cpu, str(cpu)) + "\n")
    for node, cpus in nodes.items():
        folder = sys / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    if nodes:
        (sys / "devices/system/node/online").write_text(",".join(map(str, nodes)) + "\n")
    return str(root)


def listed(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))


def two_nodes(root: Path) -> str:
    half = len(CPUS) // 2
    return system(root, {0: listed(CPUS[:half]), 3: listed(CPUS[half:])})
