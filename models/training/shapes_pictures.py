"""Drawn pictures of one to four equal shapes, the answers that name them, and the words of the model that learns them.

Everything follows from a seed. A picture's size, background, places and shades vary; its answer is its kind: a count,
a colour and a shape, "two red circles".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

QUESTION: Final = "What is in the picture?"
COUNTS: Final = ("one", "two", "three", "four")
SHAPES: Final = ("circle", "square", "triangle")
COLOURS: Final = {
    "red": (210, 40, 40), "green": (40, 150, 60), "blue": (45, 80, 205), "yellow": (225, 190, 30),
    "purple": (140, 60, 170), "black": (35, 35, 35),
}  # fmt: skip
SIZES: Final = ((48, 48), (64, 48), (48, 64), (80, 48), (48, 80), (64, 64))
"""Widths and heights in pixels: whole rows and columns of the model's tokens, so that nothing is scaled."""
_FINER: Final = 4
"""Pictures are drawn so many times larger and scaled down, which smooths edges."""

SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] in ('image', 'image_url') %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Kind:
    """What a picture shows."""

    count: int
    colour: str
    shape: str

    @property
    def answer(self) -> str:
        return f"{COUNTS[self.count - 1]} {self.colour} {self.shape}{'s' if self.count > 1 else ''}"


KINDS: Final = tuple(
    Kind(count, colour, shape)
    for count in range(1, len(COUNTS) + 1)
    for colour in COLOURS
    for shape in SHAPES
)
UNTRAINED: Final = (
    Kind(1, "purple", "square"), Kind(2, "yellow", "triangle"), Kind(3, "green", "circle"), Kind(4, "black", "square"),
)  # fmt: skip
"""Kinds that training never shows, although it shows their counts, colours and shapes."""


def draw(kind: Kind, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """A picture of this kind."""
    background = tuple(int(value) for value in rng.integers(225, 256, 3))
    picture = Image.new("RGB", (width * _FINER, height * _FINER), background)
    pen = ImageDraw.Draw(picture)
    shade = tuple(int(np.clip(value + rng.integers(-20, 21), 0, 255)) for value in COLOURS[kind.colour])
    for x, y, radius in _places(kind.count, width, height, rng):
        _draw_shape(pen, kind.shape, (x * _FINER, y * _FINER, radius * _FINER), shade)
    return picture.resize((width, height), Image.Resampling.BOX)


def _places(
    count: int, width: int, height: int, rng: np.random.Generator
) -> list[tuple[float, float, float]]:
    """Centres and radii of shapes that lie inside the picture and apart from one another."""
    short = min(width, height)
    while True:
        found: list[tuple[float, float, float]] = []
        for _ in range(60):
            radius = short * rng.uniform(0.1, 0.17)
            x, y = (rng.uniform(radius + 2, side - radius - 2) for side in (width, height))
            if all(math.hypot(x - a, y - b) > radius + other + 3 for a, b, other in found):
                found.append((x, y, radius))
            if len(found) == count:
                return found


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, place: tuple[float, float, float], shade: tuple[int, ...]
) -> None:
    x, y, radius = place
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), shade)
    elif shape == "square":
        half = radius * 0.85
        pen.rectangle((x - half, y - half, x + half, y + half), shade)
    else:
        corners = [math.radians(angle) for angle in (-90, 30, 150)]
        pen.polygon(
            [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in corners], shade
        )


def pictures(kinds: tuple[Kind, ...], seed: int) -> Iterator[tuple[Kind, Image.Image]]:
    """Endless pictures of random kinds and sizes."""
    rng = np.random.default_rng(seed)
    while True:
        kind = kinds[rng.integers(len(kinds))]
        yield kind, draw(kind, *SIZES[rng.integers(len(SIZES))], rng)


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer that has the words of question and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [QUESTION, "user\n", "assistant\n", *(kind.answer for kind in KINDS)]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
