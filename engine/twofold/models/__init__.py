"""Which models there are: one file per family, how its configuration is read, and the files a model lies in."""

from __future__ import annotations

from twofold.blocks.weights import ExpertWeights, LoadProgress, ProgressFn
from twofold.models.config import GenerationDefaults, ModelConfig, RopeConfig
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.models.registry import ARCHITECTURES, read_config

__all__ = [
    "ARCHITECTURES",
    "ExpertWeights",
    "GenerationDefaults",
    "LoadProgress",
    "ModelConfig",
    "ModelFiles",
    "ProgressFn",
    "RopeConfig",
    "open_model_files",
    "read_config",
]
