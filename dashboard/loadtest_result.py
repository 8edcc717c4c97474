"""A recorded load test as its command saw it, so that the page shows the figures that the command prints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from twofold.telemetry import queries
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.metrics import Run, Sample, span_s
from twofold.tools.loadgen.report import StageRow, stage_rows
from twofold.tools.loadgen.slo import Slo, SloResult


@dataclass(frozen=True)
class TestResult:
    """Figures by the names of `Run.figures`, rows by stage and kind of user, and objectives with what was measured."""

    figures: Mapping[str, Any]
    stages: list[StageRow]
    objectives: list[SloResult]


@dataclass(frozen=True)
class TestPlan:
    """What a test was asked for; empty texts where it recorded no plan."""

    load: str = ""
    mix: str = ""
    shape: str = ""
    slos: tuple[Slo, ...] = ()


def plan_of(test: queries.LoadTest) -> TestPlan:
    """The plan that the test sent with its samples."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        given = json.loads(test.plan_json or "{}")
        rate, total = given["rate"], sum(given["mix"].values())
        load = f"up to {given['users']:,} users" if rate is None else f"up to {rate:g} conversations/s"
        return TestPlan(
            load=f"{load} for {given['seconds']:g} s",
            mix=", ".join(f"{kind} {weight / total:.0%}" for kind, weight in given["mix"].items()),
            shape=str(given["shape"]),
            slos=tuple(Slo(**each) for each in given["slos"]),
        )
    return TestPlan()


def result_of(recorded: queries.LoadSamples, slos: tuple[Slo, ...]) -> TestResult:
    """Computed by the functions of the command `loadtest`."""
    samples = samples_of(recorded)
    run = Run(samples, span_s(samples), slos)
    return TestResult(run.figures(), stage_rows(samples), [slo.check(samples) for slo in slos])


def samples_of(recorded: queries.LoadSamples) -> list[Sample]:
    """The recorded requests as the load generator had them, without texts; times count from each request's start."""
    errors = iter(recorded.errors)
    return [
        _sample(recorded, index, "" if recorded.ok[index] else next(errors))
        for index in range(len(recorded.ok))
    ]


def _sample(recorded: queries.LoadSamples, index: int, error: str) -> Sample:
    gave_up, ok = bool(recorded.gave_up[index]), bool(recorded.ok[index])
    ttft_ms, e2e_ms = float(recorded.ttft_ms[index]), float(recorded.e2e_ms[index])
    gaps_s = np.array(recorded.itls_ms[index]) / 1e3
    pieces_s = [] if np.isnan(ttft_ms) else (ttft_ms / 1e3 + np.append(0.0, np.cumsum(gaps_s))).tolist()
    answer = AnswerStream(
        0.0,
        piece_s=pieces_s,
        prompt_tokens=int(recorded.prompt_tokens[index]),
        end_s=None if gave_up or not ok else e2e_ms / 1e3,
        _usage_tokens=int(recorded.completion_tokens[index]),
    )
    kind, _, message = error.partition(": ")
    return Sample(
        number=int(recorded.user[index]),
        turn=1,
        answer=answer,
        error_kind=None if ok else kind,
        error=None if ok else message,
        gave_up=gave_up,
        name=recorded.name[index],
        stage=recorded.stage[index],
        num_users=int(recorded.num_users[index]),
        finished_s=float(recorded.finished_s[index]),
        took_ms=e2e_ms,
    )
