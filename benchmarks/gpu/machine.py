"""The device that checks run on: a GPU by `twofold._cuda`, or the tests' played device, for a rehearsal.

A rehearsal runs every check on tiny shapes, so that none can fail of a mistake of its own on the day a GPU is there.
Its times are those of the host and mean nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The defaults are for a GPU; `REHEARSAL` is for none."""

    rounds: int = 5
    calls: int = 24
    """Of one replay, each with a routing of its own."""
    copy_bytes: int = 2 << 30
    product_rows: int = 8192
    num_uploads: int = 256
    model_layers: int = 8
    shrink: int = 1
    """Divides hidden and intermediate sizes of the models' shapes."""
    vocab_size: int = 32768
    warm_steps: int = 96
    steps: int = 64
    """Of one round of one system."""
    compare_rounds: int = 3
    logit_tokens: int = 16
    calibrate_repeats: int = 7
    formats: tuple[str, ...] = (
        "f32", "f16", "bf16", "fp8", "q8_0", "q4_0", "int8", "int4", "q4_k", "q5_k", "q6_k"
    )  # fmt: skip
    hidden: int = 512
    intermediate: int = 256
    """Of the layers that kernels are checked on."""
    prefill_tokens: tuple[int, ...] = (40, 700)
    cpu_threads: int = 0


REHEARSAL = Sizes(
    rounds=1, calls=2, copy_bytes=1 << 20, product_rows=32, num_uploads=8, model_layers=2, shrink=32,
    vocab_size=512, warm_steps=2, steps=3, compare_rounds=2, logit_tokens=3, calibrate_repeats=1,
    formats=("bf16", "q8_0"), hidden=128, intermediate=64, prefill_tokens=(40,), cpu_threads=1,
)  # fmt: skip


@dataclass
class Machine:
    """A device, what is measured on it and where files may be made."""

    module: Any
    folder: Path
    sizes: Sizes = field(default_factory=Sizes)
    trace: Path | None = None
    """Recorded routing (npz); without one, routing is drawn."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What several checks use: models, stores, ceilings."""

    @property
    def played(self) -> bool:
        return bool(self.module.host_addressable)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.played else torch.device("cuda", 0)

    def sync(self) -> None:
        """Everything launched has ended."""
        if not self.played:
            torch.cuda.synchronize()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """`run`, which has run before, as a graph; a played device has none and runs it again."""
        if self.played:
            return lambda: run() and None  # type: ignore[func-returns-value]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def replay() -> None:
            graph.replay()

        replay.run = run  # type: ignore[attr-defined]  # owns what the graph reads
        return replay

    def time_us(self, run: Callable[[], object], calls: int) -> float:
        """Median over rounds of the device's time for one of `calls` calls that `run` makes."""
        run()
        self.sync()
        return statistics.median(self._once_us(run) / calls for _ in range(self.sizes.rounds))

    def beside(self, launch: Callable[[], object], serve: Callable[[], Any]) -> Any:
        """What `serve` returns, while `launch` runs on a thread of its own: launching may wait for what is served."""
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                launch()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        served = serve()
        thread.join()
        self.sync()
        if failed:
            raise failed[0]
        return served

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def forget(self, *keys: Any) -> None:
        """Let go of what was kept by these keys, and of memory that nobody uses."""
        for key in keys:
            self.kept.pop(key, None)
        if not self.played:
            torch.cuda.empty_cache()

    def _once_us(self, run: Callable[[], object]) -> float:
        if self.played:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def expect(figures: dict[str, Any], holds: bool, expectation: str) -> dict[str, Any]:
    """Figures with their verdict; the run of checks marks the check as failed where it does not hold."""
    return figures | {"expected": expectation, "holds": bool(holds)}
