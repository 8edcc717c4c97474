"""A run's report as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twofold.tools.loadgen.metrics import METRICS, PERCENTILES, Run, Sample, percentile, span_s
from twofold.tools.loadgen.slo import Slo, SloResult

MAX_SAMPLES: Final = 10_000
"""Most samples of one run in the JSON; the metrics use all of them."""
MAX_GAPS: Final = 1_000_000
"""Most inter-token times in the JSON of one run."""
_TITLES: Final = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2EL ms"}
_COLUMNS: Final = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES))


def table(title: str, figures: Mapping[str, Any], slos: Sequence[Slo]) -> str:
    """`figures` as returned by `Run.figures`."""
    sent = figures["completed"] + figures["failed"] + figures["gave_up"]
    lines = [
        f"{title}: {figures['completed']} of {sent} completed in {figures['duration']:.2f} s",
        f"  {_number(figures['request_throughput'], 2)} requests/s, "
        f"{_number(figures['output_throughput'])} output tokens/s, "
        f"{_number(figures['total_token_throughput'])} tokens/s with the prompts "
        f"({figures['total_input_tokens']:,} + {figures['total_output_tokens']:,} tokens)",
    ]
    if slos:
        limits = ", ".join(map(str, slos))
        lines.append(f"  goodput {_number(figures['request_goodput'], 2)} requests/s ({limits})")
    if figures["gave_up"]:
        lines.append(f"  {figures['gave_up']} users closed the connection on purpose")
    if figures["max_waited_at_client_ms"] > 1:
        lines.append(
            f"  requests waited up to {figures['max_waited_at_client_ms']:,.0f} ms at the client, not counted below"
        )
    lines.append("  " + " " * 8 + "".join(f"{column:>11}" for column in _COLUMNS))
    for metric in METRICS:
        cells = (figures[f"{column}_{metric}_ms"] for column in _COLUMNS)
        lines.append(f"  {_TITLES[metric]:<8}" + "".join(f"{_number(cell, 2):>11}" for cell in cells))
    if figures["turns"]:
        lines.append(
            f"  {'turn':<8}{'answers':>11}{'prompt':>11}{'cached':>11}{'TTFT ms':>11}{'of first':>11}"
        )
        first = figures["turns"][0]["median_ttft_ms"]
        lines += [_turn(turn, first) for turn in figures["turns"]]
    lines += [
        f"  failed: {error['count']} × {error['kind']}: {error['first']}" for error in figures["errors"]
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class StageRow:
    """Requests of one kind of user in one stage; latencies in milliseconds, None where undefined."""

    stage: str
    name: str
    num_requests: int
    num_gave_up: int
    """Users who closed the connection on purpose; these requests have not failed."""
    num_failed: int
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p95: float | None
    """Over all inter-token times of the row."""
    e2el_p95: float | None
    tokens_per_s: float | None


def stage_rows(samples: Sequence[Sample]) -> list[StageRow]:
    """A row per stage and kind of user, in the order of their first samples."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.stage, sample.name), []).append(sample)
    return [_stage_row(stage, name, group) for (stage, name), group in groups.items()]


def _stage_row(stage: str, name: str, samples: Sequence[Sample]) -> StageRow:
    good = [sample for sample in samples if sample.ok]
    tokens, seconds = sum(sample.answer.completion_tokens for sample in good), span_s(samples)

    def latency(metric: str, percent: float) -> float | None:
        return percentile([value for sample in good for value in sample.values(metric)], percent)

    return StageRow(
        stage,
        name,
        len(samples),
        sum(sample.gave_up for sample in good),
        len(samples) - len(good),
        ttft_p50=latency("ttft", 50),
        ttft_p95=latency("ttft", 95),
        itl_p95=latency("itl", 95),
        e2el_p95=latency("e2el", 95),
        tokens_per_s=tokens / seconds if seconds > 0 else None,
    )


def stage_table(run: Run) -> str:
    """Requests and latencies by stage and kind of user, in the order of time."""
    columns = ("requests", "gave up", "failed", "TTFT p50", "TTFT p95", "ITL p95", "E2EL p95", "tokens/s")
    lines = [f"  {'stage':<12}{'user':<13}" + "".join(f"{column:>11}" for column in columns)]
    for row in stage_rows(run.samples):
        counts = (row.num_requests, row.num_gave_up, row.num_failed)
        figures = (row.ttft_p50, row.ttft_p95, row.itl_p95, row.e2el_p95, row.tokens_per_s)
        cells = (*(f"{count:,}" for count in counts), *map(_number, figures))
        lines.append(f"  {row.stage:<12}{row.name:<13}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def objectives(results: Sequence[SloResult]) -> str:
    """Each objective with what was measured."""
    return "\n".join(["  objectives", *(f"    {result}" for result in results)])


def as_json(run: Run) -> dict[str, Any]:
    """The metrics with the samples, up to the limits."""
    samples: list[dict[str, Any]] = []
    num_gaps = 0
    for sample in run.samples:
        num_gaps += len(sample.answer.piece_s)
        if len(samples) == MAX_SAMPLES or num_gaps > MAX_GAPS:
            break
        samples.append(_sample(sample, run.samples[0].answer.sent_s))
    return run.figures() | {"samples": samples, "num_samples_left_out": len(run.samples) - len(samples)}


def _sample(sample: Sample, begin_s: float) -> dict[str, Any]:
    answer = sample.answer
    return {
        "conversation": sample.number,
        "turn": sample.turn,
        "sent_s": answer.sent_s - begin_s,
        "waited_at_client_ms": sample.waited_s * 1e3,
        "request_id": answer.request_id,
        "error": sample.error_kind,
        "user_kind": sample.name,
        "stage": sample.stage,
        "gave_up": sample.gave_up,
        "input_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "ttft_ms": answer.ttft_ms,
        "tpot_ms": answer.tpot_ms,
        "e2el_ms": answer.e2el_ms,
        "itls_ms": [round(gap, 4) for gap in answer.itls_ms],
    }


def _turn(turn: Mapping[str, Any], first_ttft_ms: float | None) -> str:
    ttft_ms = turn["median_ttft_ms"]
    share = "-" if not first_ttft_ms or ttft_ms is None else f"{ttft_ms / first_ttft_ms:.0%}"
    cells = (
        str(turn["completed"]),
        _number(turn["mean_input_tokens"], 0),
        _number(turn["mean_cached_tokens"], 0),
        _number(ttft_ms, 2),
        share,
    )
    return f"  {turn['turn']:<8}" + "".join(f"{cell:>11}" for cell in cells)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
