"""Which architectures there are: the class name in config.json → the module that knows it, imported when asked for.

An architecture module defines two names:

    NAMING: WeightNaming                                  how its checkpoint calls the weights
    def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig

To add one, write such a module and enter it in `ARCHITECTURES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, cast

from twofold.api.errors import ModelLoadError
from twofold.blocks.weight_plan import WeightNaming
from twofold.models.config import (
    GenerationDefaults,
    ModelConfig,
    architecture_name,
    read_config_json,
    read_generation_defaults,
)
from twofold.models.gguf_config import read_gguf_config
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import Fields

ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": "twofold.models.qwen3_moe",
        "MixtralForCausalLM": "twofold.models.mixtral",
    }
)


class Architecture(Protocol):
    """What an architecture module offers."""

    NAMING: WeightNaming

    def parse_config(self, fields: Fields, generation: GenerationDefaults) -> ModelConfig: ...


def architecture(name: str, *, where: str = "architectures") -> Architecture:
    """The module of architecture `name`. Raises ModelLoadError that lists the known ones; `where` names the file."""
    module = ARCHITECTURES.get(name)
    if module is None:
        raise ModelLoadError(
            f"{where}: architecture {name!r} is unknown, expected one of {', '.join(sorted(ARCHITECTURES))}; "
            "choose a model of these"
        )
    return cast(Architecture, importlib.import_module(module))


def read_config(path: str | Path) -> tuple[ModelConfig, Architecture]:
    """The validated configuration of a model directory or GGUF file, and its architecture. Reads no weights."""
    if is_gguf(path):
        config = read_gguf_config(GgufFile.open(path))
        return config, architecture(config.architecture, where=str(path))
    directory = Path(path)
    fields = read_config_json(directory)
    module = architecture(architecture_name(fields), where=fields.where)
    config = module.parse_config(fields, read_generation_defaults(directory))
    return config.validate(fields.where), module
