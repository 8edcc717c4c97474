"""Targets on packed models: a token soon after the process begins, pages cached or not, and shared by processes."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.peers.engines import PeerError
from benchmarks.targets.engine_checks import random_model
from benchmarks.targets.file_checks import BIG_FORMAT, forget, read_s
from benchmarks.targets.lines import Line, Settings, at_most, not_measured

PANELS: Final = "model.panels"
_HOLDER: Final = Path(__file__).resolve().parent / "packed_worker.py"
_CACHED_S: Final = 2.0
_COLD: Final = 1.1
_SECOND: Final = 5.0
_PROMPT: Final = "Once upon a time there was a king"


def packed_model(settings: Settings) -> list[Line]:
    """Time to first token of a packed Q4_0 model of every depth in --layers."""
    target = f"first token of a packed {BIG_FORMAT} model of {settings.shape.layers} layers"
    try:
        with random_model(settings, BIG_FORMAT) as source:
            packed = pack(settings, source)
            try:
                return packed_lines(settings, packed, target)
            finally:
                shutil.rmtree(packed)
    except (PeerError, OSError) as error:
        return [not_measured("packed", target, str(error))]


def pack(settings: Settings, source: Path) -> Path:
    output = settings.cache / f"{source.stem}-packed"
    begun = time.perf_counter()
    _run(settings, ["pack", str(source), str(output)])
    size = (output / PANELS).stat().st_size
    settings.say(f"{output.name}: {size / 1e9:.2f} GB packed in {time.perf_counter() - begun:.1f} s")
    return output


def packed_lines(settings: Settings, packed: Path, target: str) -> list[Line]:
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
        settings.say(
            f"turn {turn + 1}: read in {reads[-1]:.2f} s, first token after {cold[-1]:.2f} s, cached {cached[-1]:.2f} s"
        )
    read, first, again = map(statistics.median, (reads, cold, cached))
    alone, both = memory_bytes(settings, packed)
    return [
        at_most("packed", f"{target}, cached", _CACHED_S, again, "s", f"{size}, from the process's begin"),
        at_most(
            "packed",
            f"{target}, not cached, ÷ reading the file",
            _COLD,
            first / read,
            "×",
            f"{first:.2f} s against {read:.2f} s for {size}",
        ),
        at_most(
            "packed",
            "memory that a second process adds",
            _SECOND,
            100 * (both - alone) / alone,
            "%",
            f"proportional set sizes: one {alone / 1e9:.2f} GB, two {both / 1e9:.2f} GB",
        ),
    ]


def first_token_s(settings: Settings, packed: Path) -> float:
    """Seconds from the start of a `twofold generate` to the first byte of its answer."""
    begun = time.perf_counter()
    with _popen(
        settings,
        ["-m", "twofold.tools.cli", "generate", str(packed), "--raw", "--prompt", _PROMPT, "--max-tokens", "1",
         "--accelerator", "none", "--cpu-threads", str(settings.threads)],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode != 0:
        raise PeerError(f"twofold generate {packed.name} ended with code {process.returncode}")
    return seconds


def memory_bytes(settings: Settings, packed: Path) -> tuple[int, int]:
    """Proportional set sizes of one process that has all weights in memory, and of two together."""
    task = json.dumps({"model": str(packed), "threads": settings.threads})
    with _popen(settings, [str(_HOLDER), task]) as first:
        try:
            _wait(first)
            alone = _pss(first.pid)
            with _popen(settings, [str(_HOLDER), task]) as second:
                try:
                    _wait(second)
                    return alone, _pss(first.pid) + _pss(second.pid)
                finally:
                    second.communicate()
        finally:
            first.communicate()


def _popen(settings: Settings, arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [settings.python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise PeerError("a process that was to hold the model did not get ready")


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise PeerError(f"/proc/{pid}/smaps_rollup says no Pss")


def _run(settings: Settings, arguments: list[str]) -> None:
    done = subprocess.run(
        [settings.python, "-m", "twofold.tools.cli", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PeerError(done.stderr.strip() or f"twofold {arguments[0]} ended with code {done.returncode}")
