"""Description of the machine that figures come from."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """CPU, physical cores that this process may use, memory and the load average when it was asked."""
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "load_average": os.getloadavg()[0],
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def command_line(program: str) -> str:
    """Command line of the module `program`, with absolute paths cut to their last part."""
    return " ".join(["python -m", program, *(_shortened(word) for word in sys.argv[1:])])


def _shortened(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}…/{Path(value).name}" if value.startswith("/") else word


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown CPU"
    fields = dict(
        (part.strip() for part in line.split(":", 1))
        for line in text.split("\n\n")[0].splitlines()
        if ":" in line
    )
    family = f" family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return f"{fields.get('model name', 'unknown CPU')}{family}"


def available_memory_bytes() -> int:
    """Memory available to a new process without swapping; total memory where the kernel does not report it."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "MemAvailable" in fields:
        return 1024 * int(fields["MemAvailable"].split()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def physical_cores() -> int:
    """Cores among those that this process may use; threads of one core count once."""
    seen = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            seen.add(siblings.read_text(encoding="utf-8").strip())
        except OSError:
            seen.add(str(cpu))
    return len(seen)
