"""Which families of models there are, and where: a line for each, whose module is imported when asked for.

A family's module defines

    def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig    of config.json
    def parse_gguf(metadata: GgufMetadata) -> ModelConfig                              of a GGUF file's header
    def config_fields(config: ModelConfig, where: str) -> dict[str, Any]               the layers in config.json's words
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from twofold.api.errors import ModelLoadError
from twofold.models.config import (
    GenerationDefaults,
    ModelConfig,
    architecture_name,
    read_config_json,
    read_generation_defaults,
)
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import Fields


@dataclass(frozen=True)
class Family:
    """What files call it: Hugging Face's classes, and GGUF's general.architecture (of several, the first reads it)."""

    module: str
    classes: tuple[str, ...]
    gguf: str


FAMILIES: Final = (
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3moe"),
    Family("mixtral", ("MixtralForCausalLM",), "llama"),
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2moe"),
    Family("qwen3_next", ("Qwen3NextForCausalLM",), "qwen3next"),
    Family("qwen3_5_moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), "qwen35moe"),
    Family("olmoe", ("OlmoeForCausalLM",), "olmoe"),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), "glm4moe"),
    Family("minimax_m2", ("MiniMaxM2ForCausalLM",), "minimax-m2"),
    Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), "ernie4_5-moe"),
    Family("granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), "granitemoe"),
    Family("gpt_oss", ("GptOssForCausalLM",), "gpt-oss"),
    Family("lfm2_moe", ("Lfm2MoeForCausalLM",), "lfm2moe"),
    Family("llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "llama4"),
    Family("deepseek", ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "deepseek2"),
    Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), "deepseek2"),
    Family("kimi_k25", ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"), "deepseek2"),
)
ARCHITECTURES: Final = tuple(sorted(name for family in FAMILIES for name in family.classes))


class FamilyModule(Protocol):
    """What a family's module offers."""

    def parse_config(self, fields: Fields, generation: GenerationDefaults) -> ModelConfig: ...

    def parse_gguf(self, metadata: GgufMetadata) -> ModelConfig: ...

    def config_fields(self, config: ModelConfig, where: str) -> dict[str, Any]: ...


def family_of(architecture: str, *, where: str = "architectures") -> FamilyModule:
    """The family of a class name. Raises ModelLoadError that lists the known ones; `where` names the file."""
    for family in FAMILIES:
        if architecture in family.classes:
            return _module(family)
    raise ModelLoadError(
        f"{where}: architecture {architecture!r} is unknown, expected one of {', '.join(ARCHITECTURES)}; "
        "choose a model of these"
    )


def read_config(path: str | Path) -> ModelConfig:
    """The validated configuration of a model directory or GGUF file. Reads no weights. Raises ModelLoadError."""
    if is_gguf(path):
        return read_gguf_config(GgufFile.open(path))
    directory = Path(path)
    fields = read_config_json(directory)
    family = family_of(architecture_name(fields), where=fields.where)
    return family.parse_config(fields, read_generation_defaults(directory)).validate(fields.where)


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The same of a GGUF file that is open already."""
    name = file.fields.get("general.architecture")
    for family in FAMILIES:
        if name == family.gguf:
            return _module(family).parse_gguf(GgufMetadata(file)).validate(str(file.path))
    raise ModelLoadError(
        f"{file.path}: general.architecture is {name!r}, expected one of "
        f"{', '.join(dict.fromkeys(family.gguf for family in FAMILIES))}; choose a model of these"
    )


def describe_family(family: Family) -> str:
    """What people call its models, and what they are made of: the first line of its module."""
    return (_module(family).__doc__ or "").partition("\n")[0]


def _module(family: Family) -> FamilyModule:
    return cast(FamilyModule, importlib.import_module(f"twofold.models.{family.module}"))
