"""A model directory opened and checked: configuration, headers and plan, no weights read.

What `load_model` begins with, and all that is needed to say how large a model is (`sizing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from twofold.model.checkpoint import Checkpoint
from twofold.model.config import ModelConfig
from twofold.model.registry import read_config
from twofold.model.weight_plan import WeightPlan, make_plan


@dataclass(frozen=True)
class ModelFiles:
    """Three things that belong together: every tensor of `plan` is in `checkpoint` with the shape `config` asks for."""

    config: ModelConfig
    """`dtype` is the checkpoint's, whatever config.json said."""
    plan: WeightPlan
    checkpoint: Checkpoint


def open_model_files(directory: str | Path) -> ModelFiles:
    """Open a Hugging Face model directory. Raises ModelLoadError for whatever is missing, damaged or unsupported."""
    config, architecture = read_config(directory)
    checkpoint = Checkpoint.open(directory)
    plan = make_plan(config, architecture.NAMING, checkpoint)
    dtype = checkpoint.entry(plan.embedding.name).check(plan.embedding.shape)
    return ModelFiles(replace(config, dtype=dtype), plan, checkpoint)
