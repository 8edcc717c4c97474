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


def arrivals_within(request_rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process that has exactly `request_rate` × `seconds` arrivals in that time, at least 1.

    The number of arrivals of a short load varies with the seed: by 6 % for 320 of them. Given their number, the moments
    of a Poisson process are independent and uniform, so only that variation is removed.
    """
    draw = random.Random(seed)  # noqa: S311  the same arrivals for the same seed
    sums = list(
        itertools.accumulate(draw.expovariate(1.0) for _ in range(max(1, round(request_rate * seconds)) + 1))
    )
    return [seconds * each / sums[-1] for each in sums[:-1]]
