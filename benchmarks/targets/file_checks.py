"""Targets on files: loading beside reading, the first token of a packed model, and a model of 17 GB in 24 GiB."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twofold.weights.host_memory import available_memory_bytes

from benchmarks.models.gguf_model import model_bytes
from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.engines import TwofoldEngine, Workload, json_lines
from benchmarks.scenario import BenchmarkError, say
from benchmarks.targets.engine_checks import WORKER
from benchmarks.targets.lines import Line, Settings, at_least, at_most, not_measured

_READ_BYTES: Final = 16 * 1024**2
BIG_FORMAT: Final = "q4_0"
PANELS: Final = "model.panels"
_ROOM_GB: Final = 1.5
"""Memory in addition to the weights: KV cache, vocabulary, Python."""
_PROMPT: Final = "Once upon a time there was a king"


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
    """Seconds until an engine on the file is ready, in a process of its own. Raises BenchmarkError."""
    task = json.dumps({"model": str(path), "threads": settings.threads})
    lines = json_lines([settings.python, WORKER, task], f"loading {path.name}", "make build")
    try:
        return float(lines[-1]["load_s"])
    except (IndexError, KeyError, TypeError) as error:
        raise BenchmarkError(f"loading {path.name} printed no time") from error


def load_time(settings: Settings) -> list[Line]:
    """Loading ÷ reading, the file dropped from the page cache before each; in turn."""
    lines = []
    for format_name in settings.formats:
        target = f"load {format_name} ÷ read the file"
        try:
            with settings.random_model(format_name) as path:
                lines.append(load_line(settings, path, target))
        except BenchmarkError as error:
            lines.append(not_measured("load", target, str(error)))
    return lines


def load_line(settings: Settings, path: Path, what: str) -> Line:
    reads, loads = [], []
    for turn in range(min(3, settings.rounds)):
        forget(path)
        reads.append(read_s(path))
        forget(path)
        loads.append(load_s(path, settings))
        say(f"{path.name}, turn {turn + 1}: read in {reads[-1]:.2f} s, loaded in {loads[-1]:.2f} s")
    read, load = statistics.median(reads), statistics.median(loads)
    size = path.stat().st_size
    note = f"{load:.2f} s against {read:.2f} s for {size / 1e9:.1f} GB ({size / read / 1e9:.1f} GB/s), cold"
    return at_most("load", what, 1.2, "×").line(load / read, note)


def big_model(settings: Settings) -> list[Line]:
    """The whole shape with all its layers in Q4_0: it loads, and it decodes."""
    shape = FULL_SHAPES[settings.shape.name]
    whole = dataclasses.replace(settings, shape=shape)
    size = model_bytes(shape, BIG_FORMAT) / 1e9
    what = f"decode of {shape.name}, {shape.layers} layers, {BIG_FORMAT} ({size:.0f} GB)"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    work = Workload(64, 16, 1, settings.threads, seed=settings.seed, vocab=shape.vocab)
    lines: list[Line] = []
    free = available_memory_bytes() / 1e9
    if free < size + _ROOM_GB:
        why = f"{free:.0f} GB of memory are free, it takes {size + _ROOM_GB:.0f}; end other programs"
        return [not_measured("big", what, why)]
    try:
        with whole.random_model(BIG_FORMAT) as path:
            lines.append(load_line(whole, path, f"load {BIG_FORMAT}, {shape.layers} layers ÷ read the file"))
            speed = TwofoldEngine(settings.python).measure(path, work).tg
    except (BenchmarkError, OSError) as error:
        return [*lines, not_measured("big", what, str(error))]
    note = f"{speed:.1f} tokens/s on {memory:.0f} GiB of memory"
    return [*lines, at_least("big", what, 0.5, "tokens/s").line(speed, note)]


def packed_model(settings: Settings) -> list[Line]:
    """A packed Q4_0 model: time to its first token, pages cached or not, and the memory of a second process."""
    what = f"first token of a packed {BIG_FORMAT} model of {settings.shape.layers} layers"
    try:
        with settings.random_model(BIG_FORMAT) as source:
            packed = settings.cache / f"{source.stem}-packed"
            command = [settings.python, "-m", "twofold.tools.cli", "pack", str(source), str(packed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BenchmarkError(done.stderr.strip() or f"twofold pack: code {done.returncode}")
            try:
                return packed_lines(settings, packed, what)
            finally:
                shutil.rmtree(packed)
    except (BenchmarkError, OSError) as error:
        return [not_measured("packed", what, str(error))]


def packed_lines(settings: Settings, packed: Path, what: str) -> list[Line]:
    panels = packed / PANELS
    size = f"{panels.stat().st_size / 1e9:.1f} GB"
    reads, cold, cached = [], [], []
    for turn in range(min(3, settings.rounds)):
        forget(panels)
        reads.append(read_s(panels))
        forget(panels)
        cold.append(first_token_s(settings, packed))
        read_s(panels)
        cached.append(first_token_s(settings, packed))
        say(
            f"turn {turn + 1}: read in {reads[-1]:.2f} s, first token after {cold[-1]:.2f} s, cached {cached[-1]:.2f} s"
        )
    read, first, again = map(statistics.median, (reads, cold, cached))
    with holding(settings, packed) as one:
        alone = _pss(one)
        with holding(settings, packed) as two:
            both = _pss(one) + _pss(two)
    not_cached = at_most("packed", f"{what}, not cached, ÷ reading the file", 1.1, "×")
    second = at_most("packed", "memory that a second process adds", 5, "%")
    sizes = f"proportional set sizes: one {alone / 1e9:.2f} GB, two {both / 1e9:.2f} GB"
    return [
        at_most("packed", f"{what}, cached", 2, "s").line(again, f"{size}, from the start of the process"),
        not_cached.line(first / read, f"{first:.2f} s against {read:.2f} s for {size}"),
        second.line(100 * (both - alone) / alone, sizes),
    ]


def first_token_s(settings: Settings, packed: Path) -> float:
    """Seconds from the start of a `twofold generate` to the first byte of its answer."""
    command = [
        settings.python, "-m", "twofold.tools.cli", "generate", str(packed), "--raw", "--prompt", _PROMPT,
        "--max-tokens", "1", "--accelerator", "none", "--cpu-threads", str(settings.threads),
    ]  # fmt: skip
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode != 0:
        raise BenchmarkError(f"twofold generate {packed.name} ended with code {process.returncode}")
    return seconds


@contextlib.contextmanager
def holding(settings: Settings, packed: Path) -> Iterator[int]:
    """Id of a process that has all weights of the model in memory."""
    task = json.dumps({"model": str(packed), "threads": settings.threads, "hold": True})
    command = [settings.python, WORKER, task]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    ) as process:
        try:
            assert process.stdout is not None
            if not any(b'"ready"' in line for line in process.stdout):
                raise BenchmarkError("a process that was to hold the model did not get ready")
            yield process.pid
        finally:
            process.communicate()


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"/proc/{pid}/smaps_rollup says no Pss")
