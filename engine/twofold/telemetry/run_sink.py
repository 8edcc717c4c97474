"""A run recorded beside others by one database sink: one per model of a server with several."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from twofold.api.request_record import RequestRecord
from twofold.api.training_step import TrainingStep
from twofold.api.types import ControlRecord, RunInfo, StepRecord
from twofold.telemetry.sink import LoadSample, RunLabel, SinkStats, TelemetrySink


class RunQueue(Protocol):
    """The database sink, as its runs use it."""

    wants_text: bool
    takes_events: bool
    url: str
    label: RunLabel

    def put(self, kind: str, payload: Any, run: int) -> None: ...
    def put_events(self, kind: str, rows: np.ndarray[Any, np.dtype[Any]], run: int) -> None: ...
    def dropped(self, kind: str, count: int) -> None: ...
    def stats(self) -> SinkStats: ...
    def recorded_run_id(self, run: int) -> int | None: ...


class RunSink(TelemetrySink):
    """Passes everything on with the number of its run."""

    def __init__(self, queue: RunQueue, run: int) -> None:
        self._queue, self._run = queue, run
        self.wants_text, self.takes_events, self.url = queue.wants_text, queue.takes_events, queue.url
        self.label = queue.label

    @property
    def run_id(self) -> int | None:
        return self._queue.recorded_run_id(self._run)

    def begin_run(self, run: RunInfo) -> None:
        if self.label != RunLabel():
            run = dataclasses.replace(run, run_name=self.label.name, run_tags=self.label.tags)
        self._queue.put("run", run, self._run)

    def request(self, record: RequestRecord) -> None:
        self._queue.put("request", record, self._run)

    def step(self, record: StepRecord) -> None:
        self._queue.put("step", record, self._run)

    def control(self, record: ControlRecord) -> None:
        self._queue.put("control", record, self._run)

    def training_step(self, record: TrainingStep) -> None:
        self._queue.put("training_step", record, self._run)

    def load_samples(self, rows: list[LoadSample]) -> None:
        self._queue.put("load_sample", rows, self._run)

    def native_events(self, kind: str, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
        self._queue.put_events(kind, rows, self._run)

    def dropped(self, kind: str, count: int) -> None:
        self._queue.dropped(kind, count)

    def stats(self) -> SinkStats | None:
        return self._queue.stats()

    def close(self) -> None:
        self._queue.put("end", None, self._run)
