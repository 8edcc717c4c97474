"""Supported models: one file per family, configuration parsing, and model files."""

from __future__ import annotations

from twofold.blocks.rope import RopeConfig
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.model_files import LoadProgress, ModelFiles, ProgressFn, open_model_files
from twofold.models.registry import ARCHITECTURES, read_config

__all__ = [
    "ARCHITECTURES",
    "GenerationDefaults",
    "LoadProgress",
    "ModelConfig",
    "ModelFiles",
    "ProgressFn",
    "RopeConfig",
    "open_model_files",
    "read_config",
]
