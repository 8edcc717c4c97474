"""Tiny multimodal models, written by transformers with random weights, and pictures for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from twofold.vision.encoder import PictureEncoder
from twofold.vision.loading import open_encoder

from tests.tiny_models.picture_families import FAMILIES, VOCABULARY
from tests.tiny_models.writing import write_tiny_tokenizer

_FIRST: Final = 267
"""Number of the tokenizer's first token for pictures."""


def write_picture_model(
    folder: Path, name: str, seed: int = 0, *, dtype: str = "float32", **text: Any
) -> Any:
    """Write the model with its tokenizer and processor; returns transformers' whole model in float32.

    dtype: of the file. text: other settings of the text part.
    """
    family = FAMILIES[name]
    of_text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **family.text,
        **text,
    }
    ids = {key: _FIRST + at for at, key in enumerate(family.tokens) if key.strip()}
    outer = {**family.outer, **ids}
    config = transformers.AutoConfig.for_model(
        family.model_type or name, text_config=of_text, vision_config=dict(family.vision), **outer
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            elif "norm" not in each:
                parameter.normal_(0, 0.3)
    for parameter in model.parameters():  # buffers may be complex
        parameter.data = parameter.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    for parameter in model.parameters():
        parameter.data = parameter.float()
    if family.renamed:
        file = folder / "model.safetensors"
        save_file({_renamed(name, family.renamed): each for name, each in load_file(file).items()}, file)
    write_tiny_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    assert tokenizer.convert_tokens_to_ids(next(iter(family.tokens.values()))) == _FIRST
    tokenizer.save_pretrained(folder)
    if family.named:
        file = folder / "tokenizer_config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": dict(family.named)})
        )
    settings = {
        "image_processor_type": family.image_processor,
        "processor_class": family.processor,
        "do_resize": True,
        **family.sizes,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if family.settings:
        named = {"processor_class": family.processor, **family.settings}
        (folder / "processor_config.json").write_text(json.dumps(named))
    return model


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    of_name = (begin for begin in prefixes if name.startswith(begin))
    begin = next(of_name, "")
    return prefixes.get(begin, "") + name.removeprefix(begin)


def encoder_of(folder: Path) -> PictureEncoder:
    """The encoder of a written model."""
    return open_encoder(folder, None, "cpu")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of soft shapes and noise."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 6, height))
    waves = [np.sin(x * rng.uniform(0.5, 3) + y * rng.uniform(0.5, 3) + rng.uniform(0, 6)) for _ in range(3)]
    values = 127 + 90 * np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
