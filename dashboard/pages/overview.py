"""Overview page: decode speed, hit rate, PCIe traffic and waiting requests."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import base
from dashboard.parts import Shown
from dashboard.view import View


def body(view: View) -> None:
    overview = view.overview()
    requests = view.query(queries.request_counts)
    _figures(view, overview, requests)
    changes = view.query(queries.control_events)
    if changes:
        st.caption("Changes during the run: " + "; ".join(map(_change, changes[:4])) + ".")
    left, right = st.columns(2)
    with parts.card(left, "overview-1", "Decode speed, tokens/s"):
        parts.chart(
            base.area(overview.at_s, overview.decode_tokens_per_s, name="decode", unit="tokens/s"),
            key="speed",
            alt="Answer tokens per second of wall time",
            advice="Falls while requests run: find the slow tokens on Requests. 0: the engine was idle.",
            note=_speed_caption(view, overview),
        )
    with parts.card(right, "overview-2", "Placement of routed experts, %"):
        parts.chart(
            base.shares(overview.at_s, overview.shares, bucket_s=overview.bucket_s),
            key="shares",
            alt="Shares of routed experts that hit the GPU cache, were fetched, or ran on the CPU",
            advice="Green is cache hits. Too little: more slots (--gpu-experts-ratio), or another --policy.",
        )
    left, right = st.columns(2)
    with parts.card(left, "overview-3", f"Experts copied over PCIe, GB/s{view.emulated}"):
        gigabytes = overview.upload_bytes_per_clock_s / 1e9
        parts.chart(
            base.area(overview.at_s, gigabytes, name="copied", unit="GB/s"),
            key="pcie",
            alt="Bytes copied to the GPU per second of the run's clock",
            advice="High beside a low hit rate: copies do not pay back. Calibrate, or compare policies on Cache.",
            note=f"{formats.size(overview.totals.upload_bytes)} in {overview.totals.num_uploads:,} uploads; "
            "rate while the engine works.",
        )
    with parts.card(right, "overview-4", "Concurrent requests"):
        parts.chart(
            base.queue(overview.at_s, overview.num_running, overview.num_waiting),
            key="queue",
            alt="Running and waiting requests",
            advice="Waiting requests for long: raise --max-num-seqs, or start another server.",
        )


def _figures(view: View, overview: queries.Overview, requests: queries.RequestCounts) -> None:
    totals = overview.totals
    tokens = overview.steps.num_decode_tokens + overview.steps.num_prefill_tokens
    now = -1 if len(overview.num_running) and view.live else None
    queued = f"{overview.num_running[now]:.0f} / {overview.num_waiting[now]:.0f}" if now else "0 / 0"
    copied = f"{formats.size(totals.upload_bytes / tokens) if tokens else 'Nothing'} per token."
    emulated_speed = f"{formats.rate(overview.steps.decode_tokens_per_clock_s)} emulated"
    parts.metrics(
        Shown(
            "Decode tokens/s",
            formats.rate(overview.steps.decode_tokens_per_wall_s),
            "Answer tokens per second of wall time in decode-only steps, all requests together.",
            emulated_speed if view.run.emulated else None,
        ),
        Shown(
            "Hit rate",
            formats.percent(totals.hit_rate),
            "Share of routed experts that were on the GPU when they were needed.",
        ),
        Shown(
            f"PCIe traffic{view.emulated}",
            formats.link_rate(overview.mean_upload_bytes_per_clock_s),
            copied,
        ),
        Shown("Running / waiting", queued, "Requests in the last whole second."),
        Shown(
            "Answered / requests",
            f"{requests.finished:,} / {requests.total:,}",
            f"Whole run: {requests.failed:,} failed, {requests.cancelled:,} cancelled.",
        ),
    )


def _change(event: queries.ControlRecord) -> str:
    has = f"{event.num_slots:,} expert slots, {event.num_pages:,} KV pages"
    return f"{formats.moment(event.at_s)} {event.kind}" + ("" if event.kind == "sleep" else f", {has}")


def _speed_caption(view: View, overview: queries.Overview) -> str:
    wall_s = view.span.end_s - view.span.begin_s
    return (
        f"{overview.steps.num_decode_tokens:,} answer tokens and {overview.steps.num_prefill_tokens:,} prompt tokens "
        f"in {formats.duration(wall_s)}."
    )


frame.live_page(
    "Overview",
    "Every expert of the model is in host memory, some are on the GPU too. For each layer and step the engine decides "
    "which experts the GPU runs, which the CPU runs, and which are worth an upload.",
    body,
)
