"""A model directory or GGUF file opened and checked: configuration, headers and plan, no weights read.

What `load_model` begins with, and all that is needed to say how large a model is (`sizing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from twofold.blocks.weight_plan import (
    MoePlan,
    WeightNaming,
    WeightPlan,
    expert_formats,
    expert_tensors,
    make_plan,
)
from twofold.models.config import ModelConfig, WeightDType, read_block_formats
from twofold.models.gguf_config import read_gguf_config
from twofold.models.registry import architecture, read_config
from twofold.weights.checkpoint import Checkpoint
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.gguf_source import GgufSource
from twofold.weights.tensor_source import TensorSource

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

    def release_layer(self, index: int) -> None:
        """Let go of the pages of a layer that has been packed or copied; see `TensorSource.release_pages`."""
        layer = self.plan.layers[index]
        specs = list(layer.dense_tensors())
        if isinstance(layer.feed_forward, MoePlan):
            specs += expert_tensors(layer.feed_forward.experts)
        names = [spec.name for spec in specs]
        self.tensors.release_pages(
            [*names, *(extra for name in names for extra in self.tensors.companions(name))]
        )

    def expert_formats(self) -> tuple[tuple[str, str, str], ...]:
        """(gate, up, down) of every layer with experts, in order."""
        return tuple(
            expert_formats(ffn.experts, self.tensors)
            for layer in self.plan.layers
            if isinstance(ffn := layer.feed_forward, MoePlan)
        )


def open_model_files(path: str | Path) -> ModelFiles:
    """Open a Hugging Face model directory or a GGUF file (of a split one, the first part).

    Raises ModelLoadError for whatever is missing, damaged or unsupported.
    """
    if is_gguf(path):
        file = GgufFile.open(path)
        config = read_gguf_config(file)
        naming = architecture(config.architecture).NAMING
        return plan_model_files(config, naming, GgufSource(file, config))
    config, known = read_config(path)
    return plan_model_files(config, known.NAMING, Checkpoint.open(path, read_block_formats(Path(path))))


def plan_model_files(config: ModelConfig, naming: WeightNaming, tensors: TensorSource) -> ModelFiles:
    """What all file formats end in: the plan, checked against the headers."""
    plan = make_plan(config, naming, tensors)
    dtype = _PLAIN.get(tensors.check(plan.embedding.name, plan.embedding.shape), config.dtype)
    return ModelFiles(replace(config, dtype=dtype), plan, tensors)
