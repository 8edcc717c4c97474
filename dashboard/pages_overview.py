"""Live overview: decode speed, hit rate, PCIe traffic and waiting requests."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries

from dashboard import figures, formats, frame


def body(view: frame.View) -> None:
    overview = view.overview()
    requests = view.query(queries.request_counts)
    _figures(view, overview, requests)
    changes = view.query(queries.control_events)
    if changes:
        st.caption("Changes during the run: " + "; ".join(map(_change, changes[:4])) + ".")
    left, right = st.columns(2)
    with frame.card(left, "overview-1"):
        st.markdown(f"**Decode speed, tokens/s{view.emulated}**")
        speed = overview.decode_tokens_per_clock_s
        frame.chart(figures.area(overview.at_s, speed, name="decode", unit="tokens/s"), key="speed")
        st.caption(_speed_caption(view, overview))
    with frame.card(right, "overview-2"):
        st.markdown("**Placement of routed experts, %**")
        frame.chart(figures.shares(overview.at_s, overview.shares, bucket_s=overview.bucket_s), key="shares")
        st.caption("Green: cache hits. The expert was already on the GPU when a token needed it.")
    left, right = st.columns(2)
    with frame.card(left, "overview-3"):
        st.markdown(f"**Experts copied over PCIe, GB/s{view.emulated}**")
        gigabytes = overview.upload_bytes_per_clock_s / 1e9
        frame.chart(figures.area(overview.at_s, gigabytes, name="copied", unit="GB/s"), key="pcie")
        st.caption(
            f"{formats.size(overview.totals.upload_bytes)} in {overview.totals.num_uploads:,} uploads; "
            "rate while the engine works."
        )
    with frame.card(right, "overview-4"):
        st.markdown("**Concurrent requests**")
        frame.chart(figures.queue(overview.at_s, overview.num_running, overview.num_waiting), key="queue")
        st.caption("Mean over the engine's steps in each time bucket; 0 while idle.")


def _figures(view: frame.View, overview: queries.Overview, requests: queries.RequestCounts) -> None:
    totals = overview.totals
    tokens = overview.steps.num_decode_tokens + overview.steps.num_prefill_tokens
    now = -1 if len(overview.num_running) and view.live else None
    queued = f"{overview.num_running[now]:.0f} / {overview.num_waiting[now]:.0f}" if now else "0 / 0"
    copied = f"{formats.size(totals.upload_bytes / tokens) if tokens else 'Nothing'} per token."
    frame.metrics(
        (
            f"Decode tokens/s{view.emulated}",
            formats.rate(overview.steps.decode_tokens_per_clock_s),
            "Answer tokens per second of decode-only steps, all requests together.",
        ),
        (
            "Hit rate",
            formats.percent(totals.hit_rate),
            "Share of routed experts that were on the GPU when they were needed.",
        ),
        (
            f"PCIe traffic{view.emulated}",
            formats.link_rate(overview.mean_upload_bytes_per_clock_s),
            copied,
        ),
        ("Running / waiting", queued, "Requests in the last whole second."),
        (
            "Answered / requests",
            f"{requests.finished:,} / {requests.total:,}",
            f"Whole run: {requests.failed:,} failed, {requests.cancelled:,} cancelled.",
        ),
    )


def _change(event: queries.ControlRecord) -> str:
    has = f"{event.num_slots:,} expert slots, {event.num_pages:,} KV pages"
    return f"{formats.moment(event.at_s)} {event.kind}" + ("" if event.kind == "sleep" else f", {has}")


def _speed_caption(view: frame.View, overview: queries.Overview) -> str:
    wall_s = view.span.end_s - view.span.begin_s
    text = (
        f"{overview.steps.num_decode_tokens:,} answer tokens and {overview.steps.num_prefill_tokens:,} prompt tokens "
        f"in {formats.duration(wall_s)}."
    )
    wall = overview.steps.decode_tokens_per_wall_s
    if view.run.clock == "virtual" and wall is not None:
        text += f" By the wall clock this machine decodes {formats.rate(wall)} tokens/s."
    return text


frame.live_page(
    "Live overview",
    "Every expert of the model is in host memory, some are on the GPU too. For each layer and step the engine decides "
    "which experts the GPU runs, which the CPU runs, and which are worth an upload.",
    body,
)
