"""Workers that time one MoE layer in turn: workers that do not measure are stopped, so that no threads spin."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from benchmarks.peers.engines import PeerError
from benchmarks.peers.shapes import FullShape

_WORKERS: Final = Path(__file__).resolve().parent / "workers"
_START_TIMEOUT_S: Final = 600.0
_ORDER_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class LayerSpec:
    """A worker: ours (`worker` is layer_worker.py, `way` a format) or kt-kernel's (kt_worker.py, a method)."""

    worker: str
    way: str
    python: str = sys.executable

    @property
    def name(self) -> str:
        return f"{'twofold' if self.worker == 'layer_worker.py' else 'kt-kernel'} {self.way}"

    def task(self, shape: FullShape, threads: int, max_tokens: int, seed: int) -> dict[str, Any]:
        key = "format" if self.worker == "layer_worker.py" else "method"
        return {
            key: self.way,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "threads": threads,
            "max_tokens": max_tokens,
            "seed": seed,
        }


@dataclass
class Timing:
    """Passes of one worker with so many tokens; `touched` is empty where the worker does not tell."""

    tokens: int
    seconds: list[float] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)


class WorkerSpec(Protocol):
    """A worker program, and the interpreter that runs it."""

    @property
    def worker(self) -> str: ...
    @property
    def python(self) -> str: ...
    @property
    def name(self) -> str: ...


class LayerProcess:
    """A running worker. It computes only between an order and its answer; else it is stopped by a signal."""

    def __init__(self, spec: WorkerSpec, task: dict[str, Any]) -> None:
        command = [spec.python, str(_WORKERS / spec.worker), json.dumps(task)]
        self.spec = spec
        self._buffer = b""
        # A file, not a pipe: it is not read while the worker runs, and a full pipe would block the worker.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{spec.name}: {spec.python} cannot be started: {error}") from error
        try:
            self.ready = self._answer(_START_TIMEOUT_S)
        except PeerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> LayerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(self, tokens: int, repeats: int, balanced: bool = False) -> Timing:
        """Let it run `repeats` passes. Raises PeerError."""
        answer = self.order({"tokens": tokens, "repeats": repeats, "balanced": balanced})
        return Timing(tokens, list(answer["seconds"]), list(answer.get("touched", [])))

    def order(self, order: dict[str, Any], timeout_s: float = _ORDER_TIMEOUT_S) -> dict[str, Any]:
        """Let it carry out an order of its own protocol; the answer, which has "seconds". Raises PeerError."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer(timeout_s)
        except OSError as error:
            raise PeerError(f"{self.spec.name} has ended: {error}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it; kill what does not end by itself."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an order that was never read
                    pipe.close()
        self._said.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line of JSON; other lines (peers chat) are passed over."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                try:
                    told = json.loads(line)
                except ValueError:
                    continue
                if isinstance(told, dict) and "error" in told:
                    raise PeerError(f"{self.spec.name}: {told['error']}")
                if isinstance(told, dict) and ("ready" in told or "seconds" in told):
                    return told
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise PeerError(f"{self.spec.name} did not answer within {timeout_s:.0f} s")
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise PeerError(f"{self.spec.name} ended without an answer: {self._last_words()}")
            self._buffer += chunk

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"code {self._process.returncode}"


@contextmanager
def running(
    specs: Sequence[LayerSpec], shape: FullShape, threads: int, max_tokens: int, seed: int = 0
) -> Iterator[tuple[list[LayerProcess], dict[str, str]]]:
    """The workers that could be started, and why others could not; all of them end afterwards."""
    started: list[LayerProcess] = []
    missing: dict[str, str] = {}
    try:
        for spec in specs:
            try:
                started.append(LayerProcess(spec, spec.task(shape, threads, max_tokens, seed)))
            except PeerError as error:
                missing[spec.name] = str(error)
        yield started, missing
    finally:
        for process in started:
            process.close()


def take_turns(
    processes: Sequence[LayerProcess],
    cases: Sequence[tuple[int, int]],
    turns: int,
    failed: dict[str, str],
    balanced: bool = False,
) -> dict[tuple[str, int], Timing]:
    """(worker's name, tokens) -> all passes. A turn goes over all cases (tokens, passes), and in each over all workers.

    A worker that fails is skipped from then on; `failed` receives the reason.
    """
    found: dict[tuple[str, int], Timing] = {}
    for _ in range(turns):
        for tokens, passes in cases:
            for process in processes:
                name = process.spec.name
                if name in failed:
                    continue
                try:
                    measured = process.measure(tokens, passes, balanced)
                except PeerError as error:
                    failed[name] = str(error)
                    continue
                kept = found.setdefault((name, tokens), Timing(tokens))
                kept.seconds += measured.seconds
                kept.touched += measured.touched
    return found
