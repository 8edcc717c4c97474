"""A model's picture encoder from llama.cpp's files: the text's GGUF file and its projector, `mmproj-*.gguf`.

`PictureEncoder` takes a Hugging Face directory. It is written here from both files' metadata, and the projector's
tensors get the names that transformers' class has for them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twofold.api.errors import ModelLoadError
from twofold.models.registry import family_named, read_config
from twofold.text.tokenizer import Tokenizer
from twofold.vision.encoder import vision_class
from twofold.vision.projector_families import FAMILIES
from twofold.vision.projector_family import ProjectorFamily, sources_of
from twofold.vision.projector_file import ProjectorFile
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import read_json_object


def projector_checkpoint(projector: Path, model: Path, folder: Path) -> dict[str, Tensor]:
    """Write what `PictureEncoder` reads to `folder`, and return the encoder's tensors.

    Tensors are float32, by transformers' names; quantised ones are dequantised.

    Args:
        projector: an mmproj-*.gguf.
        model: the text's GGUF file, or a directory made of it, whose tokenizer and size the encoder must fit.
        folder: an existing directory.

    Raises:
        ModelLoadError: a file is damaged, the type of projector is unknown, or it belongs to another model.
    """
    file = ProjectorFile(projector)
    architecture, hidden, tokenizer = _text(model)
    family, model_type = _family(file, model, architecture)
    if (width := file.size("projection_dim")) != hidden:
        raise ModelLoadError(
            f"{projector}: gives rows of {width} values, expected {hidden}, the hidden size of {model.name}; give the "
            "projector of this model"
        )
    vision = family.vision(file)
    numbers = {key: tokenizer.token_id(token) for key, token in family.tokens.items()}
    if missing := [family.tokens[key] for key, number in numbers.items() if number is None]:
        raise ModelLoadError(
            f"{model}: has no token {missing[0]}, which stands for a picture's parts; give a model that reads pictures"
        )
    tokenizer.save(folder)
    of_tokens = read_json_object(folder / "tokenizer_config.json", "the tokenizer's settings")
    _write(folder / "tokenizer_config.json", of_tokens | {"extra_special_tokens": dict(family.named_tokens)})
    pictures = family.pictures(file, vision)
    kinds = {"processor_class": family.processor, "image_processor_type": family.image_processor}
    _write(folder / "preprocessor_config.json", kinds | pictures)
    if whole := family.whole(file, vision):
        _write(folder / "processor_config.json", {"processor_class": family.processor, **whole})
    settings = {
        "model_type": model_type,
        "dtype": "float32",
        "text_config": {"hidden_size": hidden},
        "vision_config": vision,
        **family.outer(file, vision),
    }
    _write(folder / "config.json", settings | numbers)
    return _tensors(file, family, _expected(file, folder))


def _text(model: Path) -> tuple[str, Any, Tokenizer]:
    """general.architecture of the text, its hidden size and its tokenizer."""
    if is_gguf(model):
        fields = (text := GgufFile.open(model)).fields
        architecture = str(fields.get("general.architecture"))
        return architecture, fields.get(f"{architecture}.embedding_length"), Tokenizer.from_gguf(text)
    config = read_config(model)
    family = family_named(config.architecture)
    return "" if family is None else family.gguf, config.hidden_size, Tokenizer.open(model)


def _family(file: ProjectorFile, model: Path, architecture: str) -> tuple[ProjectorFamily, str]:
    """The projector's family, and transformers' model type of it with this text."""
    family = FAMILIES.get(file.kind)
    if family is None:
        raise ModelLoadError(
            f"{file.path}: is a projector of type {file.kind!r}, expected one of {', '.join(FAMILIES)}; give the "
            "Hugging Face checkpoint instead"
        )
    if architecture not in family.models:
        raise ModelLoadError(
            f"{file.path}: a projector of type {file.kind} was given for {model.name}, whose general.architecture "
            f"is {architecture!r}; expected {' or '.join(family.models)}. Give the projector of this model"
        )
    return family, family.models[architecture]


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _expected(file: ProjectorFile, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the encoder's tensors in transformers, of a class without memory."""
    config, kind = vision_class(folder)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # torch warns of the text's empty tensors
            state = kind(config).state_dict()
    except Exception as error:  # transformers raises errors of many kinds for sizes that do not go together
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"{file.path}: {kind.__name__} of transformers refuses its sizes: {reason}; download it again"
        ) from None
    return {name: tuple(each.shape) for name, each in state.items() if not name.startswith("language_model.")}


def _tensors(
    file: ProjectorFile, family: ProjectorFamily, expected: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    names, found = family.names(file), dict[str, Tensor]()
    used: set[str] = set()
    for name, shape in expected.items():
        made = sources_of(name, names)
        if made is None:
            raise ModelLoadError(
                f"{file.path}: a {file.kind} projector has no tensor for transformers' {name}"
            )
        try:
            values = made.make(*map(file.read, made.sources))
        except (RuntimeError, IndexError) as error:  # torch: other dimensions, or parts of other sizes
            raise file.wrong(
                ", ".join(made.sources), f"has another shape ({error})", f"{list(shape)}"
            ) from None
        if values.shape != shape:
            raise file.wrong(made.sources[0], f"makes {list(values.shape)}", f"{list(shape)}")
        found[name] = values
        used.update(made.sources)
    if further := sorted(file.names - used):
        raise ModelLoadError(
            f"{file.path}: holds {further[0]} and {len(further) - 1} more tensors that a {file.kind} projector does "
            "not have; it is damaged or of a newer model"
        )
    return found
