"""Overview page: what clients feel, where steps spend their time, the expert cache and the queue."""

from __future__ import annotations

import json
import shlex

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import base, times
from dashboard.parts import Shown
from dashboard.verdict import read_gbps, verdict
from dashboard.view import View


def body(view: View) -> None:
    overview = view.overview().without_lost(view.query(queries.lost_steps, view.span))
    if not overview.steps.num_steps and not view.query(queries.request_counts).total:
        _hint(view)
        return
    at_client = view.query(queries.client_times, view.span)
    if text := _verdict(view, overview):
        st.markdown(text)
    parts.metrics(*_client_times(view, overview, at_client), key="figures-felt")
    parts.metrics(*_experts(view, overview), *_requests(view, overview))
    changes = view.query(queries.control_events)
    if changes:
        st.caption("Changes during the run: " + "; ".join(map(_change, changes[:4])) + ".")
    if overview.lost:
        num_steps = sum(each.num_steps for each in overview.lost)
        st.caption(
            f":orange[Shaded: {num_steps:,} steps ran whose rows were lost. The engine was not idle there.]"
        )
    left, right = st.columns(2)
    with parts.card(left, "overview-1", "Tokens per second"):
        parts.chart(
            times.speed(overview.at_s, overview.decode_tokens_per_s, overview.prefill_tokens_per_s),
            key="speed",
            lost=overview.lost,
            alt="Decode and prompt tokens per second of wall time",
            advice="Falls while requests run: find the slow tokens on Requests. 0: the engine was idle.",
            note=_speed_note(view, overview),
        )
    with parts.card(right, "overview-2", "Time to first token (TTFT), ms"):
        series = queries.percentile_series(at_client.finished_s, at_client.ttft_s * 1e3, max_buckets=60)
        parts.chart(
            base.percentiles(series),
            key="ttft",
            lost=overview.lost,
            alt="p50, p95 and p99 of the time to first token",
            advice="Rises with the queue: raise --max-num-seqs. With long prompts: see --max-itl-ms.",
        )
    _gaps_and_prefixes(view, overview, at_client)
    _steps_and_placement(view, overview)
    _link_and_queue(view, overview)
    _kv_cache(overview)
    parts.devices(view, "overview-devices")
    st.caption(f"Which steps took longest, and why: [Slow steps](slow_steps?run={view.run.run_id}).")


def _gaps_and_prefixes(view: View, overview: queries.Overview, at_client: queries.ClientTimes) -> None:
    left, right = st.columns(2)
    with parts.card(left, "overview-7", "Gap between tokens (ITL), ms"):
        gaps = view.query(queries.token_gaps, view.span)
        parts.chart(
            base.percentiles(queries.percentile_series(gaps.at_s, gaps.gap_s * 1e3, max_buckets=60)),
            key="itl",
            lost=overview.lost,
            alt="p50, p95 and p99 of the time between two tokens of an answer, from the ends of consecutive steps",
            advice="p50 rises with the batch: that is its price. p99 alone rises: Slow steps tells why.",
            note="" if gaps.every == 1 else f"From one step in {gaps.every:,}.",
        )
    with parts.card(right, "overview-8", "Prompt tokens found in the prefix cache, %"):
        starts, share = at_client.cached_share()
        parts.chart(
            base.area(starts, share * 100, name="cached", unit="%"),
            key="cached",
            lost=overview.lost,
            alt="Share of the prompts' tokens that were in the prefix cache, by the requests' ends",
            advice="Near 0 in long conversations: raise --max-total-tokens, or keep the prompt's beginning the same.",
        )


def _hint(view: View) -> None:
    """What to do with a run that no request has reached."""
    st.info("No request has come yet. Send one, and this page fills:", icon=":material/hourglass_empty:")
    model = formats.last_part(view.run.model)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    body = body.replace("<", r"\u003c")
    st.code(
        "curl 127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}",
        language="sh",
    )


def _verdict(view: View, overview: queries.Overview) -> str:
    seconds = {name: float(values.sum()) for name, values in overview.part_seconds.items()}
    rate = read_gbps(view.run, overview)
    text = verdict(seconds, rate, queries.machine_facts(view.run).read_gb_per_s)
    return (
        f"{text} (The wall clock, on which this machine computes for the GPU.)"
        if view.run.emulated and text
        else text
    )


def _client_times(
    view: View, overview: queries.Overview, at_client: queries.ClientTimes
) -> tuple[Shown, ...]:
    steps = overview.steps
    emulated = f"{formats.rate(steps.decode_tokens_per_clock_s)} emulated" if view.run.emulated else None
    return (
        Shown(
            "Decode tokens/s",
            formats.rate(steps.decode_tokens_per_wall_s),
            "Decode tokens per second of wall time in decode-only steps, all requests together. Rejected drafts do not "
            "count.",
            emulated,
        ),
        _percentiles(
            "TTFT, p50", at_client.ttft_s, "Time to first token of the window's requests, wall clock."
        ),
        _percentiles(
            "TPOT, p50",
            at_client.tpot_s,
            "Time per output token: the mean gap between an answer's tokens, of the window's requests, wall clock.",
        ),
    )


def _percentiles(label: str, values_s: np.ndarray, text: str) -> Shown:
    known = values_s[~np.isnan(values_s)]
    if not len(known):
        return Shown(label, formats.NOTHING, text)
    p50, p95 = np.percentile(known, (50, 95))
    return Shown(label, formats.seconds(float(p50)), text, f"p95 {formats.seconds(float(p95))}")


def _experts(view: View, overview: queries.Overview) -> tuple[Shown, ...]:
    totals, run = overview.totals, view.run
    if not run.has_slots:
        return (
            _read_rate(view, overview),
            Shown("CPU threads", f"{run.cpu_threads}", f"Kernels: {run.cpu_isa}."),
        )
    tokens = overview.steps.num_decode_tokens + overview.steps.num_prefill_tokens
    rate = formats.link_rate(overview.mean_upload_bytes_per_clock_s)
    return (
        Shown(
            "Hit rate",
            formats.percent(totals.hit_rate),
            "Share of routed experts that were on the GPU when they were needed.",
        ),
        Shown(
            "PCIe per token",
            formats.size(totals.upload_bytes / tokens if tokens else None),
            "Bytes of experts copied to the GPU per token, prompt tokens included.",
            f"{rate}{' emulated' if run.emulated else ''}",
        ),
    )


def _read_rate(view: View, overview: queries.Overview) -> Shown:
    """Rate at which the CPU's experts were read."""
    rate = read_gbps(view.run, overview)
    ceiling = queries.machine_facts(view.run).read_gb_per_s
    return Shown(
        "Expert weights used",
        formats.link_rate(None if rate is None else rate * 1e9),
        "Bytes of routed experts per second of the CPU's expert time. An expert that several tokens of a step share "
        "is read once and counts for each, so batches can exceed the ceiling. Placement shows *expert weights read*.",
        f"{rate / ceiling:.0%} of {ceiling:.1f} GB/s" if rate and ceiling else None,
    )


def _requests(view: View, overview: queries.Overview) -> tuple[Shown, ...]:
    counts = view.query(queries.request_counts)
    now = -1 if len(overview.num_running) and view.live and not view.is_fixed else None
    queued = f"{overview.num_running[now]:.0f} / {overview.num_waiting[now]:.0f}" if now else "0 / 0"
    failed = f"{counts.failed:,} failed" if counts.failed else None
    return (
        Shown("Running / waiting", queued, "Requests in the last whole second."),
        Shown(
            "Answered / requests",
            f"{counts.finished:,} / {counts.total:,}",
            f"Whole run: {counts.failed:,} failed, {counts.cancelled:,} cancelled.",
            failed,
        ),
    )


def _steps_and_placement(view: View, overview: queries.Overview) -> None:
    left, right = st.columns(2) if view.run.has_slots else (st, None)
    with parts.card(left, "overview-3", "Where the wall time of steps goes, %"):
        parts.chart(
            times.parts(overview.at_s, overview.part_seconds, bucket_s=overview.bucket_s),
            key="parts",
            lost=overview.lost,
            alt="Shares of the steps' wall time by part",
            advice=_parts_advice(view, overview),
        )
    if right is None:
        st.caption("No accelerator: there is no expert cache and no link, so their charts are left out.")
        return
    with parts.card(right, "overview-4", "Placement of routed experts, %"):
        parts.chart(
            base.shares(overview.at_s, overview.shares, bucket_s=overview.bucket_s),
            key="shares",
            lost=overview.lost,
            alt="Shares of routed experts that hit the GPU cache, were fetched, or ran on the CPU",
            advice="Green is cache hits. Too little: more slots (--gpu-experts-ratio), or another --policy.",
        )


def _parts_advice(view: View, overview: queries.Overview) -> str:
    first = next(iter(overview.part_seconds), "")
    if view.run.has_slots and first == "experts_cpu":
        return (
            "Experts on the CPU take most: more slots, or a GPU with more memory (page Lab), shortens steps."
        )
    if first == "experts_cpu":
        return "Experts are read from memory: faster memory, a smaller format, or a GPU shortens steps."
    return "The largest part is where a change pays; a large rest is Python between the parts or another process."


def _link_and_queue(view: View, overview: queries.Overview) -> None:
    left, right = st.columns(2) if view.run.has_slots else (None, st)
    if left is not None:
        tokens = overview.decode_tokens_per_s + overview.prefill_tokens_per_s
        with np.errstate(divide="ignore", invalid="ignore"):
            megabytes = np.where(tokens > 0, overview.upload_bytes_per_s / tokens / 1e6, np.nan)
        copied = formats.size(overview.totals.upload_bytes)
        with parts.card(left, "overview-5", "Experts copied over PCIe, MB per token"):
            parts.chart(
                base.area(overview.at_s, megabytes, name="copied", unit="MB"),
                key="pcie",
                lost=overview.lost,
                alt="Megabytes of experts copied to the GPU per token",
                advice="High beside a low hit rate: copies do not pay back. Compare policies on Cache.",
                note=f"{copied} in {overview.totals.num_uploads:,} uploads.",
            )
    with parts.card(right, "overview-6", "Concurrent requests"):
        parts.chart(
            base.queue(overview.at_s, overview.num_running, overview.num_waiting),
            key="queue",
            lost=overview.lost,
            alt="Running and waiting requests",
            advice="Requests wait for long: raise --max-num-seqs, or start another server.",
        )


def _kv_cache(overview: queries.Overview) -> None:
    if np.isnan(overview.kv_use).all():
        return  # the run is older than schema version 9, or no step is in the window
    left, right = st.columns(2)
    with parts.card(left, "overview-9", "KV cache pages in use, %"):
        parts.chart(
            base.area(overview.at_s, overview.kv_use * 100, name="in use", unit="%"),
            key="kv-use",
            lost=overview.lost,
            alt="Share of the KV cache's pages in use, over time",
            advice="Near 100: requests wait or are preempted; raise --max-total-tokens, or choose --kv-cache-dtype.",
        )
    with parts.card(right, "overview-10", "Preemptions"):
        parts.chart(
            base.area(overview.at_s, overview.num_preemptions, name="preempted", unit="preemptions"),
            key="preemptions",
            lost=overview.lost,
            alt="Sequences preempted because pages ran out, over time",
            advice="Above 0: their prompts are computed again; fewer requests at once (--max-num-seqs) or more pages.",
            note=f"{np.nansum(overview.num_preemptions):,.0f} preemptions, each point a sum of "
            f"{formats.duration(overview.bucket_s)}.",
        )


def _change(event: queries.ControlRecord) -> str:
    has = f"{event.num_slots:,} expert slots, {event.num_pages:,} KV pages"
    return f"{formats.moment(event.at_s)} {event.kind}" + ("" if event.kind == "sleep" else f", {has}")


def _speed_note(view: View, overview: queries.Overview) -> str:
    wall_s = view.span.end_s - view.span.begin_s
    return (
        f"{overview.steps.num_decode_tokens:,} decode tokens and {overview.steps.num_prefill_tokens:,} prompt tokens "
        f"in {formats.duration(wall_s)}."
    )


frame.live_page(
    "Overview",
    "Every expert of the model is in host memory, some are on the GPU too. For each layer and step the engine decides "
    "which experts the GPU runs, which the CPU runs, and which are worth an upload.",
    body,
)
