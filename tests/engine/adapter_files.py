"""PEFT directories of random adapters that change every matrix of a model, written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from twofold.adapters.base_shapes import PARTS, BaseShapes
from twofold.step.adapters import ModelAdapters

from tests.engine.model_runs import Runner


def adapters_of(runner: Runner) -> ModelAdapters:
    """What puts adapters to the matrices of a loaded model."""
    model = runner.model
    return ModelAdapters(model.files, model.adapters, runner.moe.store, model.lm_head, model.pool)


def write_adapter(
    directory: Path, shapes: BaseShapes, seed: int, *, rank: int = 3, size: float = 0.3
) -> Path:
    """An adapter with factors of this standard deviation for every matrix but embedding and head, and every expert."""
    draw = np.random.default_rng(seed)
    tensors = {}

    def add(name: str, shape: tuple[int, int]) -> None:
        rows, columns = shape
        factors = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
        for which, sizes in factors.items():
            values = draw.normal(scale=size, size=sizes).astype(np.float32)
            tensors[f"base_model.model.{name}.{which}.weight"] = values

    for name, shape in shapes.matrices.items():
        if name not in shapes.replaceable:
            add(name, shape)
    for name, experts in shapes.experts.items():
        for number in range(experts.num_experts):
            for part in PARTS:
                add(f"{name}.{number}.{part}", experts.shape(part))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
