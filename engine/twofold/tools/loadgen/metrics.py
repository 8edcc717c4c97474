"""Metrics of samples, by the names of vLLM's benchmark. Milliseconds of the client's clock, unless a name says
otherwise."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.slo import SLO_METRICS, Slo

PERCENTILES: Final = (90, 95, 99)
METRICS: Final = SLO_METRICS
_UNIX_AT_ZERO_S: Final = time.time() - time.perf_counter()
"""Unix time of this process's monotonic zero: the ends of samples differ by true durations, whatever sets the clock."""
Failure = tuple[str, str] | tuple[None, None]
"""(kind, message) of a request that failed, or nothing."""


@dataclass(frozen=True)
class Sample:
    """One request: its answer, or why it failed."""

    number: int
    """Number of the conversation."""
    turn: int
    answer: AnswerStream
    waited_s: float = 0.0
    """Delay at the client after its arrival time, while --max-concurrency was reached."""
    error_kind: str | None = None
    error: str | None = None
    gave_up: bool = False
    """The user closed the connection on purpose: neither a complete answer nor a failure."""
    name: str = ""
    """Kind of the user."""
    stage: str = ""
    """Stage of the load in which it was sent."""
    num_users: int = 1
    """Users, or conversations of an open loop, at its end."""
    finished_s: float = 0.0
    """Unix time of its end."""
    took_ms: float = 0.0
    """From the send to its end, also for a failure."""

    @classmethod
    def finished(cls, answer: AnswerStream, now_s: float, failure: Failure, **further: Any) -> Self:
        """The sample of a request that has just ended. now_s: by `time.perf_counter`, as the answer's times."""
        took_ms = 1e3 * (now_s - answer.sent_s)
        return cls(
            answer=answer,
            error_kind=failure[0],
            error=failure[1],
            finished_s=_UNIX_AT_ZERO_S + now_s,
            took_ms=took_ms,
            **further,
        )

    @property
    def complete(self) -> bool:
        return self.ok and not self.gave_up

    @property
    def ok(self) -> bool:
        return self.error_kind is None

    def values(self, metric: str) -> Sequence[float]:
        """Values of an answer; empty if the metric is undefined for it, as E2EL is where the user gave up."""
        if metric == "itl":
            return self.answer.itls_ms
        value = getattr(self.answer, f"{metric}_ms")
        return () if value is None else (value,)

    def meets(self, slos: Sequence[Slo]) -> bool:
        """Whether the answer is complete and within every limit."""
        return self.complete and all(slo.met_by(self) for slo in slos)


def span_s(samples: Sequence[Sample]) -> float:
    """Seconds from the start of the first request to the end of the last; 0 without samples."""
    if not samples:
        return 0.0
    return max(s.finished_s for s in samples) - min(s.finished_s - s.took_ms / 1e3 for s in samples)


@dataclass(frozen=True)
class Run:
    """Result of one load."""

    samples: Sequence[Sample]
    duration_s: float
    """From the start of the first request to the end of the last."""
    slos: Sequence[Slo] = ()
    """For goodput."""

    def figures(self) -> dict[str, Any]:
        """Metrics by the names of vLLM's results; None where undefined."""
        good = [sample for sample in self.samples if sample.ok]
        num_input = sum(sample.answer.prompt_tokens or 0 for sample in good)
        num_output = sum(sample.answer.completion_tokens for sample in good)
        figures: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": sum(sample.complete for sample in good),
            "failed": len(self.samples) - len(good),
            "gave_up": sum(sample.gave_up for sample in good),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": self._per_second(sum(sample.complete for sample in good)),
            "request_goodput": (
                self._per_second(sum(sample.meets(self.slos) for sample in self.samples))
                if self.slos
                else None
            ),
            "output_throughput": self._per_second(num_output),
            "total_token_throughput": self._per_second(num_input + num_output),
            "max_waited_at_client_ms": 1e3 * max((sample.waited_s for sample in self.samples), default=0.0),
        }
        for metric in METRICS:
            figures |= statistics_of(metric, [value for sample in good for value in sample.values(metric)])
        return figures | {"errors": self.errors(), "turns": self.turns()}

    def errors(self) -> list[dict[str, Any]]:
        """Errors by kind, the most frequent first, each with its first message."""
        counts = Counter(sample.error_kind for sample in self.samples if sample.error_kind is not None)
        first = {sample.error_kind: sample.error for sample in reversed(self.samples)}
        return [{"kind": kind, "count": n, "first": first[kind]} for kind, n in counts.most_common()]

    def turns(self) -> list[dict[str, Any]]:
        """Metrics per turn of the conversations; empty if they have only one."""
        num_turns = max((sample.turn for sample in self.samples), default=0)
        if num_turns < 2:
            return []
        return [self._turn(turn) for turn in range(1, num_turns + 1)]

    def _turn(self, turn: int) -> dict[str, Any]:
        good = [sample for sample in self.samples if sample.ok and sample.turn == turn]
        cached = [sample.answer.cached_tokens for sample in good if sample.answer.cached_tokens is not None]
        return {
            "turn": turn,
            "completed": len(good),
            "mean_input_tokens": _mean([sample.answer.prompt_tokens or 0 for sample in good]),
            "mean_cached_tokens": _mean(cached),
            "median_ttft_ms": _median([value for sample in good for value in sample.values("ttft")]),
        }

    def _per_second(self, count: float) -> float | None:
        return count / self.duration_s if self.duration_s > 0 else None


def statistics_of(metric: str, values: Sequence[float]) -> dict[str, float | None]:
    """mean_ttft_ms, median_ttft_ms, p90_ttft_ms and so on."""
    named = {"mean": _mean(values), "median": _median(values)}
    named |= {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {f"{name}_{metric}_ms": value for name, value in named.items()}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile by linear interpolation; None for no values."""
    if not values:
        return None
    return float(np.percentile(values, percent))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
