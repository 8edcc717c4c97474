"""When requests arrive in the open loop."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator


def arrival_times(request_rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning, without end; the first is 0.

    Gaps are drawn from a gamma distribution of mean 1 / `request_rate` and shape `burstiness`, as in vLLM's benchmark:
    1 makes a Poisson process, less comes in bursts, more is steadier, infinity is a clock.
    """
    if math.isinf(burstiness):
        return (count / request_rate for count in itertools.count())
    draw = random.Random(seed)  # noqa: S311  the same arrivals for the same seed
    gaps = (draw.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in itertools.count())
    return itertools.accumulate(gaps, initial=0.0)
