"""The users' measurements: sent to the server, which alone writes the telemetry database, and summarised."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
from twofold.tools.loadgen.metrics import percentile

LOAD_SAMPLES_PATH: Final = "/internal/load_samples"
_BATCH: Final = 1000


@dataclass(frozen=True)
class Sample:
    """One request of one user; the fields are those of `POST /internal/load_samples`."""

    loadtest_id: str
    finished_s: float
    user: int
    num_users: int
    e2e_ms: float
    ok: bool
    ttft_ms: float | None
    tpot_ms: float | None
    completion_tokens: int
    error: str | None
    request_id: str | None = None
    """The answer's id, also in table `request`; None where no answer began."""


class SampleStore:
    """Collects samples during the test, sends them in batches and keeps them for the report.

    Where the server has no telemetry (HTTP 404) or stops taking samples, they go to a JSON-lines file instead.
    """

    def __init__(self, host: str, fallback: Path) -> None:
        self._url = host + LOAD_SAMPLES_PATH
        self._fallback = fallback
        self._unsent: list[Sample] = []
        self._to_file = False
        self._flushing = threading.Lock()
        self.samples: list[Sample] = []
        self.num_sent = 0
        self.problem: str | None = None
        """Why samples went to the file; None if they did not."""

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._unsent.append(sample)

    def flush(self) -> None:
        """Send the collected samples; concurrent calls wait for each other."""
        with self._flushing:
            while batch := self._unsent[:_BATCH]:
                if self._to_file or not self._post(batch):
                    self._to_file = True
                    self._append(batch)
                del self._unsent[: len(batch)]

    def _post(self, batch: list[Sample]) -> bool:
        body = {"samples": [asdict(sample) for sample in batch]}
        try:
            # The server is on this machine: environment proxies do not apply.
            status = httpx.post(self._url, json=body, timeout=10, trust_env=False).status_code
        except httpx.HTTPError as error:
            self.problem = f"the server stored no samples: {error}"
            return False
        if status != 200:
            self.problem = (
                "the server has no telemetry" if status == 404 else f"the server answered HTTP {status}"
            )
            return False
        self.num_sent += len(batch)
        return True

    def _append(self, batch: list[Sample]) -> None:
        with self._fallback.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample)) + "\n" for sample in batch)

    def where(self) -> str:
        """Where the samples are now, for the report."""
        if self.problem is None:
            return f"{self.num_sent:,} samples are in the server's telemetry database and on its dashboard"
        return f"samples are in {self._fallback} ({self.problem})"


def report(samples: list[Sample], seconds: float) -> str:
    """A table of percentiles, throughput and failures."""
    lines = [f"{'':<22}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}"]
    for title, field in (
        ("TTFT, ms", "ttft_ms"),
        ("TPOT, ms", "tpot_ms"),
        ("E2E, ms", "e2e_ms"),
    ):
        values = [getattr(s, field) for s in samples if s.ok and getattr(s, field) is not None]
        shown = [percentile(values, percent) for percent in (50, 95, 99, 100)]
        lines.append(f"{title:<22}" + "".join(f"{'-' if v is None else f'{v:,.1f}':>10}" for v in shown))
    good = [sample for sample in samples if sample.ok]
    tokens = sum(sample.completion_tokens for sample in good)
    lines += [
        "",
        f"{'answers':<22}{len(good):>10,}",
        f"{'answer tokens':<22}{tokens:>10,}",
        f"{'tokens/s, all users':<22}{tokens / seconds if seconds > 0 else 0.0:>10,.1f}",
        f"{'failures':<22}{len(samples) - len(good):>10,}",
    ]
    errors = Counter(sample.error or "unknown" for sample in samples if not sample.ok)
    lines += [f"  {count:>5} × {error}" for error, count in errors.most_common()]
    return "\n".join(lines)
