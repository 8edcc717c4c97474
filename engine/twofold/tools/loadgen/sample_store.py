"""Sends measured requests to the server, which alone writes the telemetry database."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from twofold.tools.loadgen.metrics import Sample, percentile

LOAD_SAMPLES_PATH: Final = "/internal/load_samples"
_BATCH: Final = 1000
_MAX_ITLS: Final = 10_000
"""Most inter-token times of one answer that are stored."""
_MAX_TEXT: Final = 1000
"""Most characters of a text that the server stores."""


class SampleStore:
    """Collects samples during the test and sends them in batches.

    Where the server has no telemetry (HTTP 404) or stops taking samples, they go to a JSON-lines file instead, if there
    is one.
    """

    def __init__(self, host: str, loadtest_id: str, fallback: Path | None, plan_json: str = "") -> None:
        """plan_json: sent with the first sample of each batch."""
        self._url = host + LOAD_SAMPLES_PATH
        self._loadtest_id = loadtest_id
        self._fallback = fallback
        self._plan_json = plan_json
        self._unsent: list[Sample] = []
        self._flushing = threading.Lock()
        self.samples: list[Sample] = []
        self.num_sent = 0
        self.problem: str | None = None
        """Why the server does not store the samples; None if it does."""

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._unsent.append(sample)

    def flush(self) -> None:
        """Send the collected samples; concurrent calls wait for each other."""
        with self._flushing:
            while batch := self._unsent[:_BATCH]:
                records = [record_of(sample, self._loadtest_id) for sample in batch]
                records[0]["plan_json"] = self._plan_json or None
                if self.problem is not None or not self._post(records):
                    self._append(records)
                del self._unsent[: len(batch)]

    def _post(self, records: list[dict[str, Any]]) -> bool:
        try:
            # The server is on this machine: environment proxies do not apply.
            status = httpx.post(self._url, json={"samples": records}, timeout=10, trust_env=False).status_code
        except httpx.HTTPError as error:
            self.problem = f"the server stored no samples: {error}"
            return False
        if status != 200:
            self.problem = (
                "the server has no telemetry" if status == 404 else f"the server answered HTTP {status}"
            )
            return False
        self.num_sent += len(records)
        return True

    def _append(self, records: list[dict[str, Any]]) -> None:
        if self._fallback is not None:
            with self._fallback.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def where(self) -> str:
        """Where the samples are now, for the report."""
        if self.problem is None:
            return (
                f"{self.num_sent:,} samples are in the server's telemetry database and on its dashboard, as "
                f"{self._loadtest_id}"
            )
        if self._fallback is None:
            return f"the samples are not on a dashboard ({self.problem})"
        return f"samples are in {self._fallback} ({self.problem})"


def record_of(sample: Sample, loadtest_id: str) -> dict[str, Any]:
    """The fields of `POST /internal/load_samples`."""
    answer = sample.answer
    error = None if sample.ok else f"{sample.error_kind}: {sample.error}"[:_MAX_TEXT]
    return {
        "loadtest_id": loadtest_id,
        "finished_s": sample.finished_s,
        "user": sample.number,
        "num_users": sample.num_users,
        "e2e_ms": sample.took_ms if answer.e2el_ms is None else answer.e2el_ms,
        "ok": sample.ok,
        "ttft_ms": answer.ttft_ms if sample.ok else None,
        "tpot_ms": answer.tpot_ms if sample.ok else None,
        "itl_p95_ms": percentile(answer.itls_ms, 95) if sample.ok else None,
        "completion_tokens": answer.completion_tokens if sample.ok else 0,
        "error": error,
        "request_id": answer.request_id,
        "stage": sample.stage or None,
        "name": sample.name or None,
        "gave_up": sample.gave_up,
        "prompt_tokens": answer.prompt_tokens,
        "itls_json": _itls_json(answer.itls_ms) if sample.ok else None,
    }


def _itls_json(itls_ms: Sequence[float]) -> str | None:
    """Inter-token times as stored; of more than _MAX_ITLS evenly spaced quantiles, which keep their percentiles."""
    if not itls_ms:
        return None
    kept: Sequence[float] = itls_ms
    if len(itls_ms) > _MAX_ITLS:
        kept = np.quantile(itls_ms, np.linspace(0, 1, _MAX_ITLS)).tolist()
    return json.dumps([round(each, 4) for each in kept], separators=(",", ":"))
