"""Ten times as many requests as a server can answer: are those taken answered as well, the others refused at once?

    python -m benchmarks overload [--seconds 30] [--rounds 5] [--places 8] [--tokens 64] [--factor 10] [--against DIR]

Against a server of its own on 127.0.0.1, the bundled model. First its capacity: as many streams as it has places, one
request after the other. Then requests arrive by chance (Poisson) at that rate times the factor, and the queue holds as
many as there are places. Both in turn, several rounds: a machine's speed drifts, and what is promised follows from the
capacity: the first token within the time that the queue and one's own place take (--slo-queues answers one after the
other), each further one within --slo-tpot times the time it takes at capacity. Fails if fewer than 99 % of those taken
are answered like that, if a refusal is no 429 or 503 with Retry-After, or if refusals take longer than --refusal-ms
(95 % of them).

Reports the client's share of a core, and the time the machine's host took from both (steal). With --against another
checkout's server is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from twofold.tools.loadgen.generator import LoadPlan
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError, TakeLine
from twofold.tools.loadgen.metrics import Run, Sample, percentile
from twofold.tools.loadgen.workload import PromptShape

from benchmarks.scenario import Report, Scenario, common, positive
from benchmarks.servers.processes import checkouts, send, serving

_PROMPT_TOKENS: Final = 32
_UNBOUNDED: Final = 1_000_000
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--rounds", "--against", "--accelerator"),
    "--seconds": {"type": float, "default": 30.0, "help": "of a server, a third of them at capacity"},
    "--places": {"type": positive, "default": 8, "help": "requests that run, and as many that wait"},
    "--tokens": {"type": positive, "default": 64, "help": "of each answer"},
    "--factor": {"type": float, "default": 10.0},
    "--slo-queues": {"type": float, "default": 3.0},
    "--slo-tpot": {"type": float, "default": 3.0},
    "--refusal-ms": {"type": float, "default": 50.0},
}


class RefusalClient(HttpClient):
    """A client to which a refusal without Retry-After is an error of another kind."""

    async def lines(
        self, path: str, body: bytes, take: TakeLine, on_sent: Callable[[], None] = lambda: None
    ) -> None:
        try:
            await super().lines(path, body, take, on_sent)
        except HttpStatusError as refusal:
            if refusal.status in (429, 503) and not refusal.retry_after:
                raise ConnectionError(f"{refusal.kind} without Retry-After") from refusal
            raise


@dataclass
class Seen:
    """Outcomes of the requests of some loads."""

    answers: list[Sample] = field(default_factory=list)
    refusals_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, run: Run) -> float:
        """Sort a load's samples; its answers per second."""
        answered = [sample for sample in run.samples if sample.ok]
        self.answers += answered
        for sample in run.samples:
            if not sample.ok and str(sample.error_kind).startswith(("HTTP 429", "HTTP 503")):
                self.refusals_ms.append(sample.took_ms)
            elif not sample.ok:
                self.problems.append(f"{sample.error_kind}: {sample.error}")
        return len(answered) / run.duration_s

    def line(self) -> str:
        ttft, tpot = (values(self.answers, metric) for metric in ("ttft", "tpot"))
        return (
            f"{len(self.answers)} answered, TTFT {_percentiles(ttft)} ms, TPOT {_percentiles(tpot)} ms "
            f"(50 / 95 / 99 %); {len(self.refusals_ms)} refused after {_percentiles(self.refusals_ms)} ms"
        )


def values(samples: Sequence[Sample], metric: str) -> list[float]:
    return [value for sample in samples for value in sample.values(metric)]


def _percentiles(of: Sequence[float]) -> str:
    return " / ".join(f"{percentile(of, q) or 0:.1f}" for q in (50, 95, 99)) if of else "–"


def stolen_s() -> float:
    """Steal time in core seconds since the machine started; 0 where it is not reported."""
    with contextlib.suppress(OSError, LookupError):
        return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Side:
    """One server and what became of all its rounds."""

    def __init__(self, name: str, url: str, args: argparse.Namespace) -> None:
        self._name, self._url, self._args = name, url, args
        self._calm, self._flood = Seen(), Seen()
        self._rates: list[tuple[float, float]] = []
        """Answers per second at capacity and beyond."""
        self._slos: list[tuple[float, float]] = []
        """Latency objective of each round: ms to the first token, ms per further token."""
        self._num_good = self._num_loads = 0
        self._client_s = self._stolen_s = self._wall_s = 0.0

    def _send(self, seconds: float, **how: Any) -> Run:
        self._num_loads += 1
        plan = LoadPlan(_UNBOUNDED, duration_s=seconds, seed=self._num_loads, **how)
        shape = PromptShape(_PROMPT_TOKENS, self._args.tokens)
        return send(self._url, plan, shape, client=RefusalClient(self._url))

    def round(self, seconds: float) -> None:
        args, calm, flood = self._args, Seen(), Seen()
        rate = calm.add(self._send(seconds / 3, max_concurrency=args.places))
        ttft_ms = args.slo_queues * statistics.median(values(calm.answers, "e2el"))
        tpot_ms = args.slo_tpot * statistics.median(values(calm.answers, "tpot"))
        client_s, stolen, begun = time.process_time(), stolen_s(), time.monotonic()
        answered = flood.add(self._send(seconds * 2 / 3, request_rate=args.factor * rate))
        self._client_s += time.process_time() - client_s
        self._stolen_s += stolen_s() - stolen
        self._wall_s += time.monotonic() - begun
        for sample in flood.answers:
            ttft, tpot = sample.answer.ttft_ms or 0.0, sample.answer.tpot_ms or 0.0
            self._num_good += ttft <= ttft_ms and tpot <= tpot_ms
        self._rates.append((rate, answered))
        self._slos.append((ttft_ms, tpot_ms))
        for whole, one in ((self._calm, calm), (self._flood, flood)):
            whole.answers += one.answers
            whole.refusals_ms += one.refusals_ms
            whole.problems += one.problems

    def outcome(self) -> tuple[list[str], list[str]]:
        """Lines of what was seen, and of what was not as promised."""
        args, calm, flood = self._args, self._calm, self._flood
        rate, answered = (statistics.median(column) for column in zip(*self._rates, strict=True))
        ttft_ms, tpot_ms = (statistics.median(column) for column in zip(*self._slos, strict=True))
        kept = statistics.median(beyond / at for at, beyond in self._rates)
        share = self._num_good / max(len(flood.answers), 1)
        seen = [
            f"capacity, {args.places} streams, {rate:.1f} requests/s: {calm.line()}",
            f"{args.factor:g} x, {answered:.1f} requests/s ({kept:.2f} of capacity): {flood.line()}",
            f"of a core the client took {100 * self._client_s / self._wall_s:.0f} %, the machine's host "
            f"{100 * self._stolen_s / self._wall_s:.0f} %",
            f"{100 * share:.1f} % of those taken had TTFT <= {ttft_ms:.0f} ms and TPOT <= {tpot_ms:.1f} ms "
            "(of each round's own capacity; medians of the rounds)",
        ]
        problems = [*calm.problems, *flood.problems][:10]
        if share < 0.99:
            late = len(flood.answers) - self._num_good
            problems.append(f"{late} of {len(flood.answers)} that were taken came late")
        if not flood.refusals_ms or (percentile(flood.refusals_ms, 95) or 0.0) > args.refusal_ms:
            problems.append("refusals were not at once")
        return [f"{self._name}: {line}" for line in seen], [f"{self._name}: {line}" for line in problems]


def measure(args: argparse.Namespace) -> Report:
    places = str(args.places)
    flags = ["--accelerator", args.accelerator, "--max-num-seqs", places, "--max-waiting", places]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = []
        for name, checkout in checkouts(args.against).items():
            server = stack.enter_context(serving(checkout, flags, Path(folder) / f"{name}.log"))
            sides.append(Side(name, server.url, args))
            send(server.url, LoadPlan(1), PromptShape(_PROMPT_TOKENS, args.tokens))
        for _ in range(args.rounds):
            for side in sides:
                side.round(args.seconds / args.rounds)
    report: Report = {"seen": [], "problems": []}
    for side in sides:
        seen, problems = side.outcome()
        report["seen"] += seen
        report["problems"] += problems
    return report


def show(report: Report) -> str:
    ok = "those taken were served as promised, the others refused at once"
    return "\n".join([*report["seen"], *(report["problems"] or [ok])])


SCENARIO: Final = Scenario(measure, show, FLAGS, failed=lambda report: bool(report["problems"]))
