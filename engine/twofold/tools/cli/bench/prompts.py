"""What `twofold bench` asks: text or random tokens; with --depth, new ones each time after a context that is kept."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams

if TYPE_CHECKING:
    from twofold.engine import Engine

_TEXT: Final = "Once upon a time there was a miller who had three sons, his mill, a donkey and a cat. "


class Prompts:
    """Prompts for an engine, `depth` tokens of which it has in its prefix cache (llama-bench's -d).

    Without a depth all prompts of a length are the same. After a context each is new, because the cache would answer
    one that it has seen.
    """

    def __init__(self, engine: Engine, *, depth: int, seed: int | None) -> None:
        self.depth = depth
        self._engine, self._seed, self._num_drawn = engine, seed, 0
        self._context = prompt_of(engine, depth, seed or 0) if depth else []

    def fill(self) -> None:
        """Read the context into the cache."""
        if self._context:
            sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            self._engine.generate(tuple(self._context), sampling)

    def next(self, length: int) -> list[int]:
        """The context and a prompt of `length` tokens."""
        if not self._context:
            return prompt_of(self._engine, length, self._seed)
        self._num_drawn += 1
        return [*self._context, *prompt_of(self._engine, length, (self._seed or 0) + self._num_drawn)]


def prompt_of(engine: Engine, num_tokens: int, seed: int | None = None) -> list[int]:
    """Exactly `num_tokens` tokens: of running text, or random ones if there is a seed. ConfigError if the context is
    too short for them.
    """
    if num_tokens >= engine.max_context:
        raise ConfigError(
            f"{num_tokens} tokens of prompt were asked for; the context holds {engine.max_context} with the answer"
        )
    if seed is not None:
        # Not for secrets: another program can draw the same tokens.
        draw = random.Random(seed)  # noqa: S311
        return [draw.randrange(engine.vocab_size) for _ in range(num_tokens)]
    sentence = engine.tokenizer.encode(_TEXT)
    return (sentence * (num_tokens // len(sentence) + 1))[:num_tokens]
