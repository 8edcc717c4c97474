"""Device runners whose model has random adapters, and the CPU's with the same ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from twofold.adapters.reading import read_adapter
from twofold.api.adapter_config import AdapterConfig
from twofold.device.runner import DeviceRunner
from twofold.step.adapters import AdaptedModel, ModelAdapters
from twofold.step.runner import ModelRunner

from tests.device.runner_runs import make_cpu_runner, make_runner
from tests.engine.adapter_files import write_adapter

LORAS: Final = AdapterConfig(max_lora_rank=8, max_cpu_loras=4)
RANKS: Final = (3, 5)
"""Ranks of the adapters 0 and 1."""


def write_adapters(root: Path, runner: DeviceRunner, size: float = 0.15) -> list[Path]:
    """Adapters of every matrix that the device's dense part has, and of every expert."""
    model = adapters_of(runner)
    matrices = {name: shape for name, shape in model.shapes.matrices.items() if name in model._places}
    shapes = dataclasses.replace(model.shapes, matrices=matrices)
    return [
        write_adapter(root / str(number), shapes, number + 7, rank=rank, size=size)
        for number, rank in enumerate(RANKS)
    ]


def adapters_of(runner: DeviceRunner) -> Any:
    assert runner._adapters is not None
    return runner._adapters


def put(model: AdaptedModel, paths: Sequence[Path], numbers: Sequence[int] = (0, 1)) -> None:
    for number, path in zip(numbers, paths, strict=True):
        model.put(number, model.prepare(read_adapter(path, model.shapes, name=str(number))))


def adapted_runner(fake: ModuleType, path: Path, **options: Any) -> DeviceRunner:
    return make_runner(fake, path, loras=LORAS, **options)


def cpu_runner(path: Path, paths: Sequence[Path]) -> ModelRunner:
    """The engine without a device, with these adapters."""
    runner = make_cpu_runner(path)
    put(cpu_adapters(runner), paths, range(len(paths)))
    return runner


def cpu_adapters(runner: ModelRunner) -> ModelAdapters:
    model = runner._model
    return ModelAdapters(model.files, model.adapters, runner.moe.store, model.lm_head, model.pool)


def errors_of(ours: Any, expected: Any) -> Any:
    """Relative error of each row."""
    return np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
