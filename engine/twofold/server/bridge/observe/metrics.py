"""Counters and histograms of the served requests, in Prometheus' text format, with vLLM's names where they fit.

Counted on the event loop only, so there are no locks. Times are wall-clock times, as a client could measure them.

Not by prometheus_client: its histograms lock, search their buckets one by one, and take one observation at a time. The
two histograms of a token cost 2.4 us with it and 0.8 us here, and four tokens that come together 9 us and 1.3 us (best
of nine runs). Sending a token costs the server about 90 us, so the difference would be 2 % of a busy loop. Only the 30
lines that write the text could be the library's, and they would add a dependency to every server.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from twofold.api.request_times import PARTS, RequestTimes
from twofold.api.types import Chunk, Usage

Gauge = tuple[str, str, float | Mapping[str, float]]
"""(name, help, value); the value is a mapping by `label_text` for several labels. A name with _total is a counter's."""

_TTFT_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS: Final = tuple(
    float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
)
_NUM_ANSWERS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
_CONTEXT: Final = ()
"""Bucket bounds 1, 2, 5, 10 … up to the longest context, which is known once the model is loaded."""

_HISTOGRAMS: Final[Mapping[str, tuple[str, Sequence[float]]]] = {
    "time_to_first_token_seconds": ("First byte of the request to first token.", _TTFT_SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of an answer.", _TOKEN_SECONDS),
    "time_per_output_token_seconds": ("Older name of inter_token_latency_seconds.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("First byte of the request to last token.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("Submitted to the engine to first scheduled.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("First scheduled to first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("First token to last token.", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("First scheduled to last token.", _REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens by request.", _CONTEXT),
    "request_prefill_kv_computed_tokens": ("Prompt tokens that no cache held, by request.", _CONTEXT),
    "request_generation_tokens": ("Generated tokens by request.", _CONTEXT),
    "request_max_num_generation_tokens": ("Generated tokens of a prompt's longest answer.", _CONTEXT),
    "request_params_max_tokens": ("max_tokens by request, as the context allowed it.", _CONTEXT),
    "request_params_n": ("Answers by prompt.", _NUM_ANSWERS),
}  # fmt: skip
"""Request histograms, with vLLM's names and buckets."""
_STAGES: Final = (*PARTS, "queue", "prefill", "deliver", "decode")
"""Stages of a request. Up to "deliver" they follow one another without gaps, so their sum is its TTFT."""
_STAGE_HELP: Final = (
    "Time of a finished request by stage, in order: body read; wait for a body worker; parse; fetch and encode "
    "pictures; wait for a tokeniser; template; tokenise; compile a grammar; queue; prefill; deliver the first token; "
    "decode."
)


class Histogram:
    """Observations counted per bucket."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def head(self) -> Iterable[str]:
        """The lines before all series of this name."""
        yield f"# HELP {self.name} {self.help_text}"
        yield f"# TYPE {self.name} histogram"

    def lines(self, labels: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(_bound_text, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{self.name}_sum{{{labels}}} {self._sum}"
        yield f"{self.name}_count{{{labels}}} {total}"


def step_tokens(steps: Mapping[int, int]) -> Histogram:
    """vLLM's histogram of tokens per step, from the number of steps by token count."""
    found = Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS)
    for num_tokens, times in steps.items():
        found.observe(num_tokens, times)
    return found


class Metrics:
    """Counters and histograms of one model's requests."""

    def __init__(self, max_context: int = 1) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        # Zeros, because Prometheus' rate() takes no account of the increment that creates a series.
        self.finished = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._recent_ttfts: deque[tuple[float, float]] = deque(maxlen=256)
        """(time of arrival, TTFT) of the latest first tokens."""
        self._recent_tokens: deque[tuple[float, float, int]] = deque(maxlen=256)
        """(time of arrival, seconds, tokens) of the latest further tokens."""
        self._histograms: dict[str, Histogram] = {}
        self._stages: dict[str, Histogram] = {}
        self.set_context(max_context)

    def set_context(self, max_context: int) -> None:
        """Reset the histograms, with buckets up to the longest context."""
        self._histograms = {
            name: Histogram(f"vllm:{name}", help_text, bounds or _buckets_up_to(max_context))
            for name, (help_text, bounds) in _HISTOGRAMS.items()
        }
        self._stages = {
            stage: Histogram("twofold:request_stage_seconds", _STAGE_HELP, _TTFT_SECONDS) for stage in _STAGES
        }

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add a value to histogram `name` of `_HISTOGRAMS`."""
        self._histograms[name].observe(value, times)

    def observe_ttft(self, value: float) -> None:
        self._recent_ttfts.append((time.monotonic(), value))
        self.observe("time_to_first_token_seconds", value)

    def recent_ttft_p95_s(self, within_s: float = 30.0) -> float:
        """95th percentile of the TTFTs measured in the last `within_s` seconds; 0 without one."""
        since = time.monotonic() - within_s
        found = sorted(value for at, value in self._recent_ttfts if at >= since)
        return found[math.ceil(0.95 * len(found)) - 1] if found else 0.0

    def observe_itl(self, seconds: float, num_tokens: int) -> None:
        """Tokens of an answer that came together, `seconds` after the one before them."""
        self._recent_tokens.append((time.monotonic(), seconds, num_tokens))
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            self.observe(name, seconds / num_tokens, num_tokens)

    def recent_tpot_s(self, within_s: float = 30.0) -> float:
        """Mean time per output token in the last `within_s` seconds; 0 without one."""
        since = time.monotonic() - within_s
        found = [(seconds, count) for at, seconds, count in self._recent_tokens if at >= since]
        return sum(seconds for seconds, _ in found) / sum(count for _, count in found) if found else 0.0

    def observe_stages(self, seconds: Mapping[str, float]) -> None:
        for stage, histogram in self._stages.items():
            histogram.observe(seconds[stage])

    def begin(self, num_answers: int = 1, times: RequestTimes | None = None) -> list[RequestTimer]:
        """One timer per answer to a prompt. They count from the request's first byte; without `times`, from now."""
        prompt = _PromptAnswers(num_answers)
        times = times or RequestTimes.begin()
        return [RequestTimer(self, prompt, times) for _ in range(num_answers)]

    def counters(self) -> list[Gauge]:
        return [
            ("vllm:prompt_tokens_total", "Prompt tokens of finished requests.", self.prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "Prefix-cache hits among them.", self.cached_tokens),
            (
                "vllm:prompt_tokens_by_source_total",
                "Prompt tokens of finished requests: local_compute, or local_cache_hit.",
                {
                    label_text(source="local_compute"): self.prompt_tokens - self.cached_tokens,
                    label_text(source="local_cache_hit"): self.cached_tokens,
                },
            ),
            ("vllm:generation_tokens_total", "Tokens generated.", self.generation_tokens),
            _by_label(
                "vllm:request_success_total", "finished_reason", "Requests by how they ended.", self.finished
            ),
        ]

    def histograms(self) -> list[tuple[Histogram, str]]:
        """Each histogram, and its labels."""
        stages = [(each, label_text(stage=stage)) for stage, each in self._stages.items()]
        return [(each, "") for each in self._histograms.values()] + stages


class HttpCounts:
    """HTTP requests of a server, whatever their model."""

    def __init__(self) -> None:
        # Zeros, because Prometheus' rate() takes no account of the increment that creates a series.
        self.refused = Counter(dict.fromkeys(("400", "429", "500", "503"), 0))
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """HTTP answers by (route, method, status class such as "2xx")."""

    def counters(self) -> list[Gauge]:
        return [
            _by_label(
                "twofold:requests_refused_total", "code", "Requests refused, by HTTP code.", self.refused
            ),
            (
                "http_requests_total",
                "HTTP requests by route, method and class of status.",
                {
                    label_text(handler=route, method=method, status=status): float(count)
                    for (route, method, status), count in sorted(self.answered.items())
                },
            ),
        ]


@dataclass(frozen=True)
class Series:
    """Values of one model, or of the whole server, for /metrics."""

    model: str
    """Value of the label model_name; empty for the server's own values beside several models."""
    gauges: Sequence[Gauge] = ()
    histograms: Sequence[tuple[Histogram, str]] = ()
    """Each with further labels."""


def exposition(parts: Iterable[Series]) -> str:
    """Prometheus' text format: all series of a name follow one another."""
    lines: dict[str, list[str]] = {}
    for part in parts:
        labels = label_text(model_name=part.model)
        for name, help_text, value in part.gauges:
            kind = "counter" if name.endswith("_total") else "gauge"
            of_name = lines.setdefault(name, [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"])
            if isinstance(value, Mapping):
                of_name += [f"{name}{{{labels},{further}}} {one}" for further, one in value.items()]
            else:
                of_name.append(f"{name}{{{labels}}} {value}")
        for histogram, further in part.histograms:
            of_name = lines.setdefault(histogram.name, [*histogram.head()])
            of_name += histogram.lines(f"{labels},{further}" if further else labels)
    return "\n".join(line for of_name in lines.values() for line in of_name) + "\n"


@dataclass
class _PromptAnswers:
    """The answers to one prompt, whose tokens are counted once."""

    num_answers: int
    finished: list[Usage] = field(default_factory=list)


class RequestTimer:
    """Times one answer, from the first byte of its request to its last token."""

    def __init__(self, metrics: Metrics, prompt: _PromptAnswers, times: RequestTimes) -> None:
        self._metrics = metrics
        self._prompt = prompt
        self._times = times
        self._first: float | None = None
        self._latest = times.received
        self._ended = False
        self.reason = ""
        """Finish reason in vLLM's terms; empty before the end."""
        self.usage: Usage | None = None
        """Counts and times by the engine; None before the end, and for an answer without a client."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None before it."""
        return None if self._first is None else self._first - self._times.received

    def observe(self, batch: Sequence[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in batch:
            num_tokens = len(chunk.token_ids)
            if num_tokens:
                self._observe_tokens(num_tokens, now)
            if chunk.finish_reason is not None:
                self._end(chunk.finish_reason, chunk.usage)

    def _observe_tokens(self, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens += num_tokens
        if self._first is None:
            self._first = now
            self._times.first_sent_s = self._times.first_sent_s or self._times.unix_s(now)
            metrics.observe_ttft(now - self._times.received)
            num_tokens -= 1
        if num_tokens:
            metrics.observe_itl(now - self._latest, num_tokens)
        self._latest = now

    def end(self) -> None:
        """Stop timing; an answer without its last chunk was abandoned by its client."""
        self._end("cancelled", None)

    def _end(self, reason: str, usage: Usage | None) -> None:
        if self._ended:
            return
        self._ended = True
        # vLLM's terms: "abort" is an answer whose client disconnected.
        self.reason, self.usage = "abort" if reason == "cancelled" else reason, usage
        self._metrics.finished[self.reason] += 1
        if usage is not None:
            self._count_prompt(usage)
        if reason in ("stop", "length"):
            self._metrics.observe("e2e_request_latency_seconds", time.perf_counter() - self._times.received)
            if usage is not None:
                self._observe(usage)

    def _count_prompt(self, usage: Usage) -> None:
        metrics, prompt = self._metrics, self._prompt
        if not prompt.finished:
            metrics.prompt_tokens += usage.prompt_tokens
            metrics.cached_tokens += usage.cached_tokens
        prompt.finished.append(usage)
        if len(prompt.finished) == prompt.num_answers:
            longest = max(each.completion_tokens for each in prompt.finished)
            metrics.observe("request_params_n", prompt.num_answers)
            metrics.observe("request_max_num_generation_tokens", longest)

    def _observe(self, usage: Usage) -> None:
        queue_s, prefill_s, decode_s = usage.wall_s
        if usage.completion_tokens:  # a pooled prompt has no tokens to time
            per_token_s = decode_s / (usage.completion_tokens - 1) if usage.completion_tokens > 1 else 0.0
            self._metrics.observe("request_time_per_output_token_seconds", per_token_s)
        for name, value in (
            ("request_queue_time_seconds", queue_s),
            ("request_prefill_time_seconds", prefill_s),
            ("request_decode_time_seconds", decode_s),
            ("request_inference_time_seconds", prefill_s + decode_s),
            ("request_prompt_tokens", usage.prompt_tokens),
            ("request_prefill_kv_computed_tokens", usage.prompt_tokens - usage.cached_tokens),
            ("request_generation_tokens", usage.completion_tokens),
            ("request_params_max_tokens", usage.max_tokens),
        ):
            self._metrics.observe(name, value)
        self._metrics.observe_stages(self.stages(usage))

    def stages(self, usage: Usage) -> dict[str, float]:
        """Seconds of each stage of the finished answer."""
        times = self._times
        queue_s, prefill_s, decode_s = usage.wall_s
        in_engine = times.submitted + queue_s + prefill_s
        deliver_s = max(self._first - in_engine, 0.0) if self._first is not None else 0.0
        after = {"queue": queue_s, "prefill": prefill_s, "deliver": deliver_s, "decode": decode_s}
        return dict(times.parts) | after


def label_text(**labels: str) -> str:
    """Labels in the exposition format."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _by_label(name: str, label: str, help_text: str, counts: Mapping[str, int]) -> Gauge:
    return name, help_text, {label_text(**{label: key}): counts[key] for key in sorted(counts)}


def _buckets_up_to(most: int) -> list[float]:
    steps = (digit * 10.0**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [bound for bound in steps if bound <= most]


def _bound_text(bound: float) -> str:
    """A bound as prometheus_client formats it: exponents from a million on."""
    if bound < 1e6:
        return repr(bound)
    power = math.floor(math.log10(bound))
    return f"{bound / 10**power:g}e+{power:02}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
