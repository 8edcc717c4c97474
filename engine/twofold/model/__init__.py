"""Models: what a checkpoint is, how it is read, and the forward pass over it.

`load_model` is the way in. Its names are imported when asked for, because configs, checkpoints and sizes are of use
(to `twofold doctor`, to tests) where the native modules are not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twofold.model.config import GenerationDefaults, ModelConfig, RopeConfig
from twofold.model.model_files import ModelFiles, open_model_files
from twofold.model.registry import ARCHITECTURES, read_config
from twofold.model.weights import ExpertWeights, LoadProgress, ProgressFn

if TYPE_CHECKING:
    from twofold.model.model import BatchMeta, LoadedModel, load_model

__all__ = [
    "ARCHITECTURES",
    "BatchMeta",
    "ExpertWeights",
    "GenerationDefaults",
    "LoadProgress",
    "LoadedModel",
    "ModelConfig",
    "ModelFiles",
    "ProgressFn",
    "RopeConfig",
    "load_model",
    "open_model_files",
    "read_config",
]

_NATIVE = ("BatchMeta", "LoadedModel", "load_model")


def __getattr__(name: str) -> Any:
    if name in _NATIVE:
        from twofold.model import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
