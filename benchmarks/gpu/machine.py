"""The device that checks run on: a GPU by `twofold._cuda`, or the tests' fake device, for a rehearsal.

A rehearsal runs every check on tiny shapes, so that none can fail of a mistake of its own on the day a GPU is there.
Its times are those of the host and mean nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from twofold.device.device import Device


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. The defaults are for a GPU; `REHEARSAL` is for none."""

    rounds: int = 5
    calls: int = 24
    """Calls per replay, each with its own routing."""
    copy_bytes: int = 2 << 30
    product_rows: int = 8192
    num_uploads: int = 256
    model_layers: int = 8
    """Layers of random weights that are written; a deeper model repeats them."""
    shrink: int = 1
    """Divides hidden and intermediate sizes of the models' shapes."""
    vocab_size: int = 32768
    warm_steps: int = 96
    steps: int = 64
    """Steps per round of one system."""
    compare_rounds: int = 3
    logit_tokens: int = 16
    calibrate_repeats: int = 3
    prompt_tokens: int = 512
    answer_tokens: int = 64
    """Length of the commands' answers."""
    hidden: int = 512
    intermediate: int = 256
    """Intermediate size of the layers that kernels are checked on."""
    prefill_tokens: tuple[int, ...] = (40, 700)
    kernel_tokens: int = 4096
    """Tokens of the largest layer that decode is timed and calibrated with."""
    cpu_threads: int = 0
    late_s: float = 1.0
    """Seconds that the server of a step to be lost is late; 0: the device's wait has no clock of its own."""


REHEARSAL = Sizes(
    rounds=1, calls=2, copy_bytes=1 << 20, product_rows=32, num_uploads=8, model_layers=2, shrink=32,
    vocab_size=512, warm_steps=2, steps=3, compare_rounds=2, logit_tokens=3, calibrate_repeats=1,
    prompt_tokens=8, answer_tokens=3, hidden=128, intermediate=64, prefill_tokens=(40,), kernel_tokens=4,
    cpu_threads=1, late_s=0.0,
)  # fmt: skip


class CannotRunError(Exception):
    """A check needs what this machine lacks; the message names it."""


@dataclass
class Machine:
    """A device, what is measured on it and where files may be made."""

    hardware: Device
    folder: Path
    """Where models of random weights are written, and found again by a later run."""
    sizes: Sizes = field(default_factory=Sizes)
    trace: Path | None = None
    """Recorded routing (npz); without one, routing is drawn."""
    program: tuple[str, ...] = (sys.executable, "-m", "twofold.tools.cli")
    """Command line of `twofold`."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """Values shared by several checks: models, stores, ceilings."""

    @property
    def device(self) -> torch.device:
        return self.hardware.torch_device

    def sync(self) -> None:
        """Waits for all launched work."""
        self.hardware.synchronise()

    def time_us(self, run: Callable[[], object], calls: int) -> float:
        """Median over rounds of the device's time for one of `calls` calls that `run` makes."""
        run()
        self.sync()
        return statistics.median(self.hardware.time_us(run) / calls for _ in range(self.sizes.rounds))

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Result of `make`, cached under `key`."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def forget(self, *keys: Any) -> None:
        """Drop the values kept under these keys, and free unused GPU memory."""
        for key in keys:
            self.kept.pop(key, None)
        torch.cuda.empty_cache()


def expect(figures: dict[str, Any], holds: bool, expectation: str) -> dict[str, Any]:
    """Figures with their verdict; the run of checks marks the check as failed where it does not hold."""
    return figures | {"expected": expectation, "holds": bool(holds)}
