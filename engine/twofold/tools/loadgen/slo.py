"""Service level objectives (SLO): `ttft_p95_ms=500` limits a percentile of a latency."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from twofold.api.errors import ConfigError

SLO_METRICS: Final = ("ttft", "tpot", "itl", "e2el")
_FORM: Final = re.compile(r"([a-z0-9]+)_p(\d{1,2}(?:\.\d+)?|100)_ms=(\d+(?:\.\d+)?)")
_EXAMPLE: Final = "ttft_p95_ms=500,itl_p95_ms=50"


class Measured(Protocol):
    """A request: `metrics.Sample`."""

    @property
    def ok(self) -> bool: ...

    def values(self, metric: str) -> Sequence[float]: ...


@dataclass(frozen=True)
class Slo:
    """A limit for one percentile of one latency."""

    metric: str
    percent: float
    limit_ms: float

    def __str__(self) -> str:
        which = "" if self.percent == 100 else f" p{self.percent:g}"
        return f"{self.metric}{which} ≤ {self.limit_ms:g} ms"

    @property
    def option(self) -> str:
        """As `parse_slos` reads it."""
        return f"{self.metric}_p{self.percent:g}_ms={self.limit_ms:g}"

    def met_by(self, sample: Measured) -> bool:
        """Whether the request's own percentile is within the limit; True if the latency is undefined for it."""
        values = sample.values(self.metric)
        return not len(values) or float(np.percentile(values, self.percent)) <= self.limit_ms

    def check(self, samples: Sequence[Measured]) -> SloResult:
        """The percentile over all answers of `samples`."""
        values = [value for sample in samples if sample.ok for value in sample.values(self.metric)]
        return SloResult(self, float(np.percentile(values, self.percent)) if values else None)


@dataclass(frozen=True)
class SloResult:
    """A limit and the measured percentile; None if nothing was measured."""

    slo: Slo
    value_ms: float | None

    @property
    def met(self) -> bool:
        """False if nothing was measured: an objective without data is not met."""
        return self.value_ms is not None and self.value_ms <= self.slo.limit_ms

    def __str__(self) -> str:
        measured = "nothing measured" if self.value_ms is None else f"{self.value_ms:,.1f} ms"
        return f"{'met   ' if self.met else 'missed'}  {self.slo}: {measured}"

    def as_json(self) -> dict[str, Any]:
        return vars(self.slo) | {"value_ms": self.value_ms, "met": self.met}


def parse_slos(text: str) -> tuple[Slo, ...]:
    """`METRIC_pPERCENT_ms=LIMIT`, separated by commas. ConfigError for anything else."""
    return tuple(_parse_slo(part.strip()) for part in text.split(",")) if text else ()


def _parse_slo(part: str) -> Slo:
    found = _FORM.fullmatch(part)
    if found is None or found[1] not in SLO_METRICS:
        raise ConfigError(
            f"{part!r} was given; METRIC_pPERCENT_ms=LIMIT is expected, METRIC being one of "
            f"{', '.join(SLO_METRICS)}, e.g. {_EXAMPLE}"
        )
    return Slo(found[1], float(found[2]), float(found[3]))


def limits(by_metric: Mapping[str, float]) -> tuple[Slo, ...]:
    """Limits that every value of an answer must meet, in milliseconds by metric."""
    return tuple(Slo(metric, 100, limit_ms) for metric, limit_ms in by_metric.items())
