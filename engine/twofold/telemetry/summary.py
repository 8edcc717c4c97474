"""The main figures of a run, as `twofold telemetry summary` prints them."""

from __future__ import annotations

from typing import Any

from twofold.telemetry import queries


def summarise(url: str, *, run_id: int | None = None) -> dict[str, Any]:
    """Figures of the last run (or of `run_id`) in a telemetry database, ready for JSON.

    Token counts cover prompts and answers. `decode_tokens_per_s` covers decode-only steps on the run's clock (emulated
    when "emulated" is true), `decode_tokens_per_wall_s` the same in wall time. Figures without data are None, as are
    hit rate and policy where there are no expert slots on a GPU. Raises ConfigError if there is no database or no run.
    """
    db = queries.open_database(url)
    run = queries.find_run(db, run_id)
    placements = queries.placement_totals(db, run)
    steps = queries.step_totals(db, run)
    requests = queries.request_counts(db, run)
    decisions = queries.cache_event_counts(db, run)
    copied = queries.upload_counts(db, run)
    estimate = queries.estimate_error(db, run)
    num_tokens = steps.num_prefill_tokens + steps.num_decode_tokens
    return {
        "run_id": run.run_id,
        "started_s": run.started_s,
        "finished_s": run.finished_s,
        "live": run.is_live(),
        "state": run.state(),
        "model": run.model,
        "accelerator": run.accelerator,
        "emulated": run.emulated,
        "clock": run.clock,
        "policy": run.policy if run.has_slots else None,
        "version": run.version,
        "requests": {
            "total": requests.total,
            "finished": requests.finished,
            "failed": requests.failed,
            "cancelled": requests.cancelled,
            "unfinished": requests.unfinished,
        },
        "steps": steps.num_steps,
        "prefill_tokens": steps.num_prefill_tokens,
        "decode_tokens": steps.num_decode_tokens,
        "decode_tokens_per_s": steps.decode_tokens_per_clock_s,
        "decode_tokens_per_wall_s": steps.decode_tokens_per_wall_s,
        "hits": placements.num_hits,
        "cpu_misses": placements.num_cpu,
        "fetched": placements.num_fetched,
        "hit_rate": placements.hit_rate,
        "uploads": placements.num_uploads,
        "uploads_per_token": placements.num_uploads / num_tokens if num_tokens else None,
        "uploads_by_reason": {reason.name.lower(): count for reason, count in copied.items()},
        "h2d_bytes": placements.upload_bytes,
        "h2d_bytes_per_token": placements.upload_bytes / num_tokens if num_tokens else None,
        "prediction_error_median": estimate.median if estimate else None,
        "prediction_error_p90": estimate.p90 if estimate else None,
        "evictions": decisions[queries.CacheEventKind.EVICT],
        "dropped_events": {
            f"{entry.kind}/{entry.place}": entry.num_events for entry in queries.dropped(db, run)
        },
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The figures as lines for a terminal."""
    emulated = " (emulated)" if summary["emulated"] else ""

    def figure(value: float | None, pattern: str) -> str:
        return "-" if value is None else pattern.format(value)

    requests = summary["requests"]
    lost = sum(summary["dropped_events"].values())
    what = ", ".join(f"{count:,} {name}" for name, count in summary["dropped_events"].items())
    policy = "no experts on a GPU" if summary["policy"] is None else f"policy {summary['policy']}"
    state = "interrupted (crash or kill)" if summary["state"] == "interrupted" else summary["state"]
    lines = [
        ("run", f"{summary['run_id']}, {state}, Twofold {summary['version']}"),
        ("model", summary["model"]),
        ("accelerator", f"{summary['accelerator']}, {summary['clock']} clock, {policy}"),
        (
            "requests",
            f"{requests['total']:,}: {requests['finished']:,} finished, {requests['failed']:,} failed, "
            f"{requests['cancelled']:,} cancelled, {requests['unfinished']:,} "
            f"{'running' if summary['live'] else 'unfinished'}",
        ),
        ("tokens", f"{summary['prefill_tokens']:,} prefill, {summary['decode_tokens']:,} decode"),
        ("decode", figure(summary["decode_tokens_per_s"], "{:,.1f} tokens/s") + emulated),
        ("decode, wall", figure(summary["decode_tokens_per_wall_s"], "{:,.1f} tokens/s on this machine")),
    ]
    if summary["policy"] is not None:
        uploads = figure(summary["uploads_per_token"], "{:.2f}")
        lines += [
            ("hit rate", figure(summary["hit_rate"], "{:.1%}")),
            ("uploads", f"{summary['uploads']:,}, {uploads} per token"),
            ("", ", ".join(f"{count:,} by {name}" for name, count in summary["uploads_by_reason"].items())),
            ("over PCIe", f"{summary['h2d_bytes'] / 1e6:,.1f} MB{emulated}"),
            ("evictions", f"{summary['evictions']:,}"),
        ]
    lines += [
        ("prediction", figure(summary["prediction_error_median"], "{:.1%} median error of a layer's time")),
        ("lost events", f"{what}: the figures are too low by as much" if lost else "none"),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in lines)
