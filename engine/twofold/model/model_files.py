"""A model directory opened and checked: configuration, headers and plan, no weights read.

What `load_model` begins with, and all that is needed to say how large a model is (`sizing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from twofold.model.checkpoint import Checkpoint
from twofold.model.config import ModelConfig, WeightDType
from twofold.model.registry import read_config
from twofold.model.tensor_source import TensorSource
from twofold.model.weight_plan import WeightNaming, WeightPlan, make_plan

_PLAIN: Final[Mapping[str, WeightDType]] = MappingProxyType(
    {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
)


@dataclass(frozen=True)
class ModelFiles:
    """Three things that belong together: every tensor of `plan` is in `tensors` with the shape `config` asks for."""

    config: ModelConfig
    """`dtype` is that of the checkpoint's embedding where that is a plain one, whatever config.json said."""
    plan: WeightPlan
    tensors: TensorSource


def open_model_files(directory: str | Path) -> ModelFiles:
    """Open a Hugging Face model directory. Raises ModelLoadError for whatever is missing, damaged or unsupported."""
    config, architecture = read_config(directory)
    return plan_model_files(config, architecture.NAMING, Checkpoint.open(directory))


def plan_model_files(config: ModelConfig, naming: WeightNaming, tensors: TensorSource) -> ModelFiles:
    """What all file formats end in: the plan, checked against the headers."""
    plan = make_plan(config, naming, tensors)
    dtype = _PLAIN.get(tensors.check(plan.embedding.name, plan.embedding.shape), config.dtype)
    return ModelFiles(replace(config, dtype=dtype), plan, tensors)
