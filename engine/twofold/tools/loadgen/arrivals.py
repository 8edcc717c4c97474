"""Arrival times of requests in the open loop."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator


def arrival_times(request_rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning, an endless sequence; the first is 0.

    Gaps are drawn from a gamma distribution of mean 1 / `request_rate` and shape `burstiness`, as in vLLM's benchmark:
    1 is a Poisson process, smaller values come in bursts, larger ones are steadier, infinity is a constant interval.
    """
    if math.isinf(burstiness):
        return (count / request_rate for count in itertools.count())
    draw = random.Random(seed)  # noqa: S311  the same arrivals for the same seed
    gaps = (draw.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in itertools.count())
    return itertools.accumulate(gaps, initial=0.0)
