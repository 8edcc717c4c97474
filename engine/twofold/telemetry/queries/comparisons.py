"""Two runs compared: the difference of a quantity's mean, with a confidence interval by the bootstrap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
_MAX_SAMPLES: Final = 2000
"""Samples of one side that are resampled: evenly spaced ones of a longer series."""
_SEED: Final = 0


@dataclass(frozen=True)
class Difference:
    """Means of two runs' samples, and the interval of the second minus the first."""

    first: float
    second: float
    low: float
    """Bounds of the CONFIDENCE interval of second - first."""
    high: float
    num_first: int
    num_second: int

    @property
    def change(self) -> float:
        """Relative change from the first to the second."""
        return self.second / self.first - 1 if self.first else float("nan")

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(first: F64, second: F64) -> Difference | None:
    """Compare the means of two series; NaN is ignored. None if one has fewer than two samples.

    The interval is the percentile bootstrap (Efron 1979): both series are resampled with replacement RESAMPLES times,
    from a fixed seed, and the interval holds the middle CONFIDENCE of the differences of their means.
    """
    sides = [values[~np.isnan(values)] for values in (first, second)]
    if min(map(len, sides)) < 2:
        return None
    random = np.random.default_rng(_SEED)
    resampled = [_means(values, random) for values in sides]
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled[1] - resampled[0], (outside, 1 - outside))
    means = [float(values.mean()) for values in sides]
    return Difference(means[0], means[1], float(low), float(high), len(sides[0]), len(sides[1]))


def _means(values: F64, random: np.random.Generator) -> F64:
    """Means of RESAMPLES draws of as many values with replacement."""
    if len(values) > _MAX_SAMPLES:
        values = values[np.linspace(0, len(values) - 1, _MAX_SAMPLES).astype(np.int64)]
    drawn = random.integers(0, len(values), (RESAMPLES, len(values)), np.int32)
    return np.asarray(values[drawn].mean(axis=1), np.float64)
