"""How a type of projector files is described: what transformers calls its settings, tokens and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from twofold.vision.projector_file import ProjectorFile

Settings = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """A tensor of transformers' class that files hold in another form."""

    sources: tuple[str, ...]
    """Names in the file."""
    make: Callable[..., Tensor]
    """Takes the sources' values, in their order."""


Names = Mapping[str, str | Made]
"""transformers' name: the file's, or how the tensor is made. {} is the number of a layer in both; names without
.weight and .bias stand for both."""


@dataclass(frozen=True)
class ProjectorFamily:
    """Projector files of one type."""

    models: Mapping[str, str]
    """general.architecture of the text's file: transformers' model type."""
    vision: Callable[[ProjectorFile], Settings]
    """transformers' vision_config."""
    processor: str
    image_processor: str
    pictures: Callable[[ProjectorFile, Settings], Settings]
    """Settings of the image processor, from the file and vision_config."""
    tokens: Mapping[str, str]
    """Key of a token's number in config.json: token."""
    names: Callable[[ProjectorFile], Names]
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens by the names that the processor asks the tokenizer for."""
    outer: Callable[[ProjectorFile, Settings], Settings] = lambda file, vision: {}
    """Settings of config.json beside vision_config."""
    whole: Callable[[ProjectorFile, Settings], Settings] = lambda file, vision: {}
    """Settings of the processor, which has further ones than the image processor."""


def colours(file: ProjectorFile) -> Settings:
    """Mean and deviation of pictures' values, by colour."""
    return {
        "image_mean": file.numbers("image_mean", above=-1e30),
        "image_std": file.numbers("image_std", above=0.0),
    }


def sources_of(name: str, names: Names) -> Made | None:
    """Where a file has the tensor that transformers calls `name`; None: no rule names it."""
    for each, suffix in ((name, ""), name.rpartition(".")[::2]):
        layer = next((part for part in each.split(".") if part.isdigit()), "")
        template = each.replace(f".{layer}.", ".{}.", 1) if layer else each
        rule = names.get(each) or names.get(template)
        if isinstance(rule, Made):
            return Made(tuple(source.replace("{}", layer) for source in rule.sources), rule.make)
        if rule is not None and suffix:
            return Made((f"{rule.replace('{}', layer)}.{suffix}",), lambda values: values)
    return None
