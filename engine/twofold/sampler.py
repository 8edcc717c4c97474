"""Picks the next token from one row of logits. Pure numpy; a request's seed alone decides its draws.

Order of the filters, as in Hugging Face's generate: penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from twofold.types import Draw, SamplingParams


class Sampler:
    """The sampling state of one request: its random generator and the counts its penalties need.

    `sample` picks from logits. Where a device picks, `draw` says by which numbers and `take` hears what came of it.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], default_seed: int | None = None
    ) -> None:
        self._params = params
        seed = params.seed if params.seed is not None else default_seed
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._uniform: float | None = None
        self._generated: Counter[int] = Counter()
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set()

    def draw(self) -> Draw | None:
        """What decides the next token besides its logits; the same until one is taken. None: it needs `sample`."""
        params = self._params
        if self._has_penalties:
            return None
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, self._next_uniform())

    def take(self, token: int) -> None:
        """The next token has been picked by `draw`."""
        self._uniform = None
        if self._has_penalties:
            self._generated[token] += 1
            self._seen.add(token)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Return the next token's id for `logits` of shape (vocabulary,)."""
        if self._has_penalties:
            logits = self._penalised(logits)
        token = int(np.argmax(logits)) if self._params.temperature == 0.0 else self._pick(logits)
        self.take(token)
        return token

    def _next_uniform(self) -> float:
        if self._params.temperature == 0.0:
            return 0.0
        if self._uniform is None:
            self._uniform = float(self._random.random())
        return self._uniform

    @property
    def _has_penalties(self) -> bool:
        params = self._params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """OpenAI's presence and frequency penalties; CTRL's repetition penalty (Keskar et al. 2019, section 4.1)."""
        params = self._params
        logits = logits.copy()
        if self._seen and params.repetition_penalty != 1.0:
            ids = np.fromiter(self._seen, dtype=np.int64)
            values = logits[ids]
            scale = np.float32(params.repetition_penalty)
            logits[ids] = np.where(values > 0, values / scale, values * scale)
        if self._generated:
            ids = np.fromiter(self._generated.keys(), dtype=np.int64)
            counts = np.fromiter(self._generated.values(), dtype=np.float32)
            logits[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
        return logits

    def _pick(self, logits: NDArray[np.float32]) -> int:
        params = self._params
        # Sorting only the candidates that top-k leaves keeps a 151,936-token vocabulary affordable.
        if 0 < params.top_k < logits.size:
            candidates = np.flatnonzero(logits >= np.partition(logits, -params.top_k)[-params.top_k])
        else:
            candidates = np.arange(logits.size)
        # Of equals the lower number comes first, also at the border of top-k: a device has to pick the same token.
        candidates = candidates[np.argsort(-logits[candidates], kind="stable")][: params.top_k or None]
        scaled = logits[candidates].astype(np.float64)
        # Subtract before dividing: a tiny temperature then underflows the losers to 0 instead of overflowing.
        probabilities = np.exp((scaled - scaled[0]) / params.temperature)
        probabilities /= probabilities.sum()
        cumulative = np.cumsum(probabilities)
        keep = candidates.size
        if params.top_p < 1.0:
            keep = min(keep, int(np.searchsorted(cumulative, params.top_p)) + 1)
        if params.min_p > 0.0:
            keep = min(keep, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
        draw = self._next_uniform() * cumulative[keep - 1]
        return int(candidates[min(int(np.searchsorted(cumulative[:keep], draw, side="right")), keep - 1)])


def settle(
    samplers: Sequence[Sampler], picked: Sequence[int], logits: Callable[[int], NDArray[np.float32]]
) -> list[int]:
    """The tokens of a step that a device has sampled; those below 0 it could not decide, and the host does.

    Args:
        samplers: of the step's rows.
        picked: a token for each, or a number below 0.
        logits: of a row, asked only where they are needed.
    """
    tokens = []
    for row, (sampler, token) in enumerate(zip(samplers, picked, strict=True)):
        if token < 0:
            tokens.append(sampler.sample(logits(row)))
        else:
            sampler.take(token)
            tokens.append(token)
    return tokens
