"""Targets on files: how long loading takes beside reading, and a model of 17 GB in 24 GiB of memory."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Final

from benchmarks.peers import machine
from benchmarks.peers.engines import PeerError, TwofoldEngine, Workload, last_json_lines
from benchmarks.peers.gguf_model import model_bytes
from benchmarks.peers.shapes import FULL_SHAPES
from benchmarks.targets.engine_checks import random_model
from benchmarks.targets.lines import Line, Settings, at_least, at_most, not_measured

_LOADER: Final = Path(__file__).resolve().parent / "load_worker.py"
_READ_BYTES: Final = 16 * 1024**2
BIG_FORMAT: Final = "q4_0"
_ROOM_GB: Final = 1.5
"""Memory in addition to the weights: KV cache, vocabulary, Python."""


def forget(path: Path) -> None:
    """Ask the kernel to drop the file's pages. They must be on the disk; mapped pages stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_s(path: Path) -> float:
    """Seconds to read the whole file in order, 16 MB at a time, into the same memory."""
    buffer = bytearray(_READ_BYTES)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begun


def load_s(path: Path, settings: Settings) -> float:
    """Seconds until an engine on the file is ready, in a process of its own. Raises PeerError."""
    task = json.dumps({"model": str(path), "threads": settings.threads})
    lines = last_json_lines([settings.python, str(_LOADER), task], f"loading {path.name}", "make build")
    try:
        return float(lines[-1]["load_s"])
    except (IndexError, KeyError, TypeError) as error:
        raise PeerError(f"loading {path.name} printed no time") from error


def load_time(settings: Settings) -> list[Line]:
    """Loading ÷ reading, the file dropped from the page cache before each; in turn."""
    lines = []
    for format_name in settings.formats:
        target = f"load {format_name} ÷ read the file"
        try:
            with random_model(settings, format_name) as path:
                lines.append(load_line(settings, path, target))
        except PeerError as error:
            lines.append(not_measured("load", target, str(error)))
    return lines


def load_line(settings: Settings, path: Path, target: str) -> Line:
    reads, loads = [], []
    for turn in range(min(3, settings.rounds)):
        forget(path)
        reads.append(read_s(path))
        forget(path)
        loads.append(load_s(path, settings))
        settings.say(f"{path.name}, turn {turn + 1}: read in {reads[-1]:.2f} s, loaded in {loads[-1]:.2f} s")
    read, load = statistics.median(reads), statistics.median(loads)
    size = path.stat().st_size
    note = f"{load:.2f} s against {read:.2f} s for {size / 1e9:.1f} GB ({size / read / 1e9:.1f} GB/s), cold"
    return at_most("load", target, 1.2, load / read, "×", note)


def big_model(settings: Settings) -> list[Line]:
    """The whole shape with all its layers in Q4_0: it loads, and it decodes."""
    shape = FULL_SHAPES[settings.shape.name]
    whole = Settings(**{**vars(settings), "shape": shape})
    size = model_bytes(shape, BIG_FORMAT) / 1e9
    target = f"decode of {shape.name}, {shape.layers} layers, {BIG_FORMAT} ({size:.0f} GB)"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    work = Workload(64, 16, 1, settings.threads, settings.seed, shape.vocab)
    lines: list[Line] = []
    free = machine.available_memory_bytes() / 1e9
    if free < size + _ROOM_GB:
        why = f"{free:.0f} GB of memory are free, it takes {size + _ROOM_GB:.0f}; end other programs"
        return [not_measured("big", target, why)]
    try:
        with random_model(whole, BIG_FORMAT) as path:
            lines.append(load_line(whole, path, f"load {BIG_FORMAT}, {shape.layers} layers ÷ read the file"))
            speed = TwofoldEngine(settings.python).measure(path, work).tg
    except (PeerError, OSError) as error:
        return [*lines, not_measured("big", target, str(error))]
    note = f"{speed:.1f} tokens/s on {memory:.0f} GiB of memory"
    return [*lines, at_least("big", target, 0.5, speed, "tokens/s", note)]
