"""Quality loss of quantisation: distance of the new model's next-token probabilities from the source's, on a text.

For every position, after the text before it: the KL divergence of the new distribution from the source's (in nats), and
whether the likeliest token is the same; over the text, both models' perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles
from twofold.quantise.layers import LayeredModel

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_LOGITS_AT_ONCE: Final = 8 * 1024 * 1024
_VERDICTS: Final = (
    (0.005, "as good as the source"),
    (0.03, "good: close to the source"),
    (
        0.10,
        "noticeable: expect other words than the source's; take a format with more bits where answers matter",
    ),
    (math.inf, "bad: far from the source, expect misspelt words; take a format with more bits"),
)
"""Quality levels by mean KL divergence in nats, rounded: the bundled model's 8-, 6- and 5-bit formats stay below the
first, its 4-bit ones below the second (docs/guides/quantise.md)."""


@dataclass(frozen=True)
class Quality:
    """Comparison over all positions."""

    num_tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_top: float
    """Share of positions with the same likeliest token."""
    source_perplexity: float
    perplexity: float
    drift: tuple[float, ...]
    """Distance of the hidden states from the source's after each layer, relative to their length."""

    @property
    def verdict(self) -> str:
        return next(text for limit, text in _VERDICTS if self.mean_kl < limit or limit == math.inf)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.num_tokens,
            "kl_mean": self.mean_kl,
            "kl_p99": self.p99_kl,
            "kl_max": self.max_kl,
            "same_top_token": self.same_top,
            "source_perplexity": self.source_perplexity,
            "perplexity": self.perplexity,
            "verdict": self.verdict,
            "drift_by_layer": list(self.drift),
        }


def compare(
    source: ModelFiles,
    quantised: ModelFiles,
    sequences: Sequence[Sequence[int]],
    pool: ops.ThreadPool,
    progress: Callable[[int, int], None] | None = None,
    cache_dtypes: tuple[CacheDType, CacheDType] = ("float32", "float32"),
) -> Quality:
    """Compare both models on `sequences` (each of two tokens or more), with one layer of one model in memory at a time.

    cache_dtypes: KV cache types of the two models.
    """
    layers = source.config.num_target_layers
    models = [
        LayeredModel(files, pool, dtype)
        for files, dtype in zip((source, quantised), cache_dtypes, strict=True)
    ]
    drift: list[float] = []
    states: list[list[F32]] = [[], []]
    for states in map(list, zip(*(model.hidden_states_by_layer(sequences) for model in models), strict=True)):
        away = sum(
            float(np.square(new - old).sum(dtype=np.float64)) for old, new in zip(*states, strict=True)
        )
        size = sum(float(np.square(old).sum(dtype=np.float64)) for old in states[0])
        drift.append(math.sqrt(away / size) if size > 0 else 0.0)
        if progress is not None:
            progress(len(drift), layers)
    step = max(1, _LOGITS_AT_ONCE // source.config.vocab_size)

    def compared() -> Iterable[tuple[I64, F32, F32]]:
        for sequence, source_rows, other_rows in zip(sequences, *states, strict=True):
            following = np.array([*sequence[1:], -1])
            for begin in range(0, len(sequence), step):
                rows = slice(begin, begin + step)
                yield following[rows], models[0].logits(source_rows[rows]), models[1].logits(other_rows[rows])

    return quality_of(compared(), tuple(drift))


def quality_of(compared: Iterable[tuple[I64, F32, F32]], drift: tuple[float, ...] = ()) -> Quality:
    """Quality from (next tokens in the text, -1: none, the source's logits, the others'), in batches of rows."""
    divergence, same, losses = [], [], ([], [])  # type: ignore[var-annotated]
    for following, source_logits, logits in compared:
        p, q = log_probabilities(source_logits), log_probabilities(logits)
        divergence.append(np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
        is_known = following >= 0
        index = np.flatnonzero(is_known), following[is_known]
        losses[0].append(-p[index])
        losses[1].append(-q[index])
    kl = np.concatenate(divergence)
    return Quality(
        num_tokens=len(kl),
        mean_kl=float(kl.mean()),
        p99_kl=float(np.quantile(kl, 0.99)),
        max_kl=float(kl.max()),
        same_top=float(np.concatenate(same).mean()),
        source_perplexity=float(np.exp(np.concatenate(losses[0]).mean())),
        perplexity=float(np.exp(np.concatenate(losses[1]).mean())),
        drift=drift,
    )


def log_probabilities(logits: npt.NDArray[np.float32]) -> F64:
    """Natural logarithms of the softmax of each row."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    normalised: F64 = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return normalised
