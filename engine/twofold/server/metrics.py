"""Counters and histograms of the served requests, in Prometheus' text format and under vLLM's names where
they fit.

Counted on the event loop only, so nothing here locks. Times are of the wall: what a client could have
measured.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from twofold.api.types import Chunk

Gauge = tuple[str, str, str, float | Mapping[tuple[str, str], float]]
"""(name, type, help, value); values by (label, its value) where there are several."""

_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)


class Histogram:
    """Observations in seconds, counted per bucket."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name = name
        self.help_text = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, labels: str) -> Iterable[str]:
        yield f"# HELP {self.name} {self.help_text}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{self.name}_sum{{{labels}}} {self._sum}"
        yield f"{self.name}_count{{{labels}}} {total}"


class Metrics:
    """Everything /metrics shows that the server itself counts."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Request accepted to first token."
        )
        self.inter_token_latency = Histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.")
        self.end_to_end = Histogram("vllm:e2e_request_latency_seconds", "Request accepted to last token.")

    def begin(self, *, counts_prompt: bool = True) -> RequestTimer:
        return RequestTimer(self, counts_prompt=counts_prompt)

    def text(self, model: str, gauges: Iterable[Gauge]) -> str:
        """The exposition text. `gauges` were read from the engine and its sink just now."""
        labels = f'model_name="{_escaped(model)}"'
        lines: list[str] = []
        counters: list[Gauge] = [
            (
                "vllm:prompt_tokens_total",
                "counter",
                "Prompt tokens of finished requests.",
                self.prompt_tokens,
            ),
            ("vllm:generation_tokens_total", "counter", "Tokens generated.", self.generation_tokens),
        ]
        for name, kind, help_text, value in (*counters, *gauges):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            if isinstance(value, Mapping):
                lines += [f'{name}{{{labels},{key}="{of}"}} {one}' for (key, of), one in value.items()]
            else:
                lines.append(f"{name}{{{labels}}} {value}")
        for name, label, help_text, counts in (
            ("vllm:request_success_total", "finished_reason", "Requests by how they ended.", self.finished),
            ("twofold:requests_refused_total", "code", "Requests refused, by HTTP code.", self.refused),
        ):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
            lines += [f'{name}{{{labels},{label}="{_escaped(key)}"}} {counts[key]}' for key in sorted(counts)]
        for histogram in (self.time_to_first_token, self.inter_token_latency, self.end_to_end):
            lines.extend(histogram.lines(labels))
        return "\n".join(lines) + "\n"


class RequestTimer:
    """Times one answer from its request's acceptance to its last token.

    Of several answers to a prompt one counts the prompt's tokens.
    """

    def __init__(self, metrics: Metrics, *, counts_prompt: bool = True) -> None:
        self._metrics = metrics
        self._counts_prompt = counts_prompt
        self._begun = self._latest = time.perf_counter()
        self._first_seen = False
        self._reason = "abort"

    def saw(self, batch: Sequence[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in batch:
            num_tokens = len(chunk.token_ids)
            if num_tokens:
                self._saw_tokens(num_tokens, now)
            if chunk.finish_reason is not None:
                # vLLM's words: "abort" is an answer that its client did not want any more.
                self._reason = "abort" if chunk.finish_reason == "cancelled" else chunk.finish_reason
                if chunk.usage is not None and self._counts_prompt:
                    self._metrics.prompt_tokens += chunk.usage.prompt_tokens

    def _saw_tokens(self, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens += num_tokens
        if not self._first_seen:
            self._first_seen = True
            metrics.time_to_first_token.observe(now - self._begun)
            num_tokens -= 1
        if num_tokens:
            metrics.inter_token_latency.observe((now - self._latest) / num_tokens, num_tokens)
        self._latest = now

    def end(self) -> None:
        self._metrics.finished[self._reason] += 1
        if self._reason in ("stop", "length"):
            self._metrics.end_to_end.observe(time.perf_counter() - self._begun)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
