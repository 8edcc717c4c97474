"""Requests: the tokens of one request, layer by layer, and the causes of slow tokens."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import explanation, formats, frame, parts
from dashboard.figures import request as figures
from dashboard.view import View

PAGE_SIZE = 100
ANY = "anything"


def body(view: View) -> None:
    reasons = view.query(queries.finish_reasons)
    if not reasons:
        st.info(
            "This run has no requests yet. Send one.",
            icon=":material/hourglass_empty:",
        )
        return
    request = _choose(view, reasons)
    if request is None:
        st.info("No requests match the filter.", icon=":material/search_off:")
        return
    number = request.number
    _figures(view, request)
    # From the last prompt token on: its step samples the first answer token.
    tokens = view.query(queries.request_tokens, number, first_position=request.prompt_tokens - 1)
    if not len(tokens.position):
        tokens = view.query(queries.request_tokens, number)
    if not len(tokens.position):
        st.info(
            "No placements are stored for this request: not recorded yet, or deleted when the database reached its "
            "size limit.",
            icon=":material/hourglass_empty:",
        )
        return
    misses = tokens.num_by_placement[:, :, [queries.Placement.CPU, queries.Placement.FETCHED]].sum(
        axis=(1, 2)
    )
    # Not the first one: its step includes the prefill.
    first = min(1, len(tokens.position) - 1)
    slowest = first + int(np.argmax(np.nan_to_num(tokens.step_us[first:])))
    positions = tokens.position.tolist()
    with parts.card(st, "requests-1"):
        st.markdown(f"**Step time of each token{view.emulated}**")
        chosen = positions.index(
            st.select_slider(
                "Token to explain (the slowest one first)",
                positions,
                value=positions[slowest],
                key=f"token-{view.run.run_id}-{number}",
            )
            if len(positions) > 1
            else positions[0]
        )
        unit = "emulated ms" if view.run.emulated else "ms"
        parts.chart(
            figures.token_times(tokens.position, tokens.step_us, misses, chosen, unit=unit),
            key="tokens",
            alt="Step time of each token of the answer",
            advice="Select a high bar with the slider: the causes are listed below.",
        )
    with parts.card(st, "requests-2"):
        st.markdown("**Misses by token and layer**")
        parts.chart(
            figures.token_layer_misses(tokens.position, tokens.num_by_placement),
            key="misses",
            alt="Heatmap of tokens and layers: routed experts that were not on the GPU",
            advice="A dark column is a slow token; a dark row is a layer whose slots are too few.",
        )
    _token(view, request, tokens, chosen)


def _choose(view: View, reasons: list[str]) -> queries.Request | None:
    """Select a request by number or id, by finish reason, and by page, so that every request is reachable."""
    searched, ended, paged = st.columns([3, 2, 2])
    search = searched.text_input(
        "Search", placeholder="number or part of the request id", key=f"search-{view.run.run_id}"
    )
    chosen_reason = ended.selectbox("Ended by", [ANY, *reasons], key=f"ended-{view.run.run_id}")
    like: dict[str, str] = {"search": search}
    if chosen_reason != ANY:
        like["ended_by"] = chosen_reason
    found = view.query(queries.num_requests, **like)
    num_pages = max(1, -(-found // PAGE_SIZE))
    page = paged.number_input(
        f"Page of {num_pages:,} ({found:,} requests)",
        min_value=1,
        max_value=num_pages,
        key=f"page-{view.run.run_id}-{search}-{chosen_reason}",
    )
    requests = view.query(queries.requests, **like, limit=PAGE_SIZE, offset=(page - 1) * PAGE_SIZE)
    if not requests:
        return None
    by_number = {request.number: request for request in requests}
    newest = next((i for i, request in enumerate(requests) if request.finish_reason), 0)
    number = st.selectbox(
        "Request", list(by_number), index=newest, format_func=lambda key: _name(by_number[key]), key="request"
    )
    return by_number[number]


def _figures(view: View, request: queries.Request) -> None:
    prompt, answer, queued, prefill, per_token, end = parts.card(st, "request").columns(6)
    prompt.metric(
        "Prompt tokens (cached)",
        f"{request.prompt_tokens:,} ({request.cached_tokens:,})",
        help="In parentheses: prefix cache hits.",
    )
    answer.metric("Answer tokens", f"{request.completion_tokens:,}")
    queued.metric(f"Queued{view.emulated}", formats.seconds(request.queue_s))
    prefill.metric(f"Prefill{view.emulated}", formats.seconds(request.prefill_s))
    further = request.completion_tokens - 1
    per_token.metric(
        f"Per token{view.emulated}",
        formats.seconds(request.decode_s / further) if further > 0 else formats.NOTHING,
        help="Decode time per output token (TPOT), on the run's clock.",
    )
    end.metric("Ended by", request.finish_reason or "still running")


def _token(view: View, request: queries.Request, tokens: queries.RequestTokens, chosen: int) -> None:
    step = int(tokens.step[chosen])
    uploads = view.query(queries.uploads, first_step=step, last_step=step)
    with parts.card(st, "requests-3"):
        st.markdown(f"**Why the token at position {int(tokens.position[chosen])} took this long**")
        reasons = explanation.sentences(tokens, chosen, uploads, emulated=view.run.emulated)
        st.markdown("\n".join(f"- {reason}" for reason in reasons))
        times = view.query(queries.step_times, step)
        first = int(tokens.position[chosen]) < request.prompt_tokens
        bars = explanation.step_time_bars(times, request.queue_s if first else None)
        st.html(f'<div class="tf-wide">{bars}</div>')
        left, right = st.columns([3, 2])
        with left:
            st.caption(f"Time of each layer{view.emulated}")
            times = (tokens.layer_us, tokens.cpu_us, tokens.gpu_us)
            # On a virtual clock a layer takes the predicted time by construction: nothing to compare.
            predicted = None if view.run.emulated else tokens.predicted_us[chosen]
            parts.chart(
                figures.layer_times(*(values[chosen] for values in times), predicted),
                key="layers",
                alt="CPU time, GPU time and layer time of each MoE layer",
                advice="A layer far above the others holds the token up: look at its experts below.",
            )
        with right:
            st.caption(f"Uploads of this step (step {step}){view.emulated}")
            if uploads:
                parts.chart(
                    figures.upload_timeline(uploads),
                    key="uploads",
                    alt="Copies of this step on the link",
                    advice="Demand copies in a row mean that the layer waited: prefetch or more slots would help.",
                )
            else:
                st.markdown("No uploads in this step.")
        st.caption("Experts of each layer by router weight (the small figure), coloured by where they ran")
        parts.placement_key()
        st.html(
            f'<div class="tf-wide">{explanation.layer_table(tokens, chosen, emulated=view.run.emulated)}</div>'
        )


def _name(request: queries.Request) -> str:
    return (
        f"{request.number} · {formats.moment(request.submitted_s)} · {request.prompt_tokens} + "
        f"{request.completion_tokens} tokens · {request.finish_reason or 'running'} · "
        f"{formats.shortened(request.request_id)}"
    )


frame.live_page(
    "Requests",
    "Select a request: each bar is one token of its answer. The slowest token is explained below; the slider selects "
    "another.",
    body,
    refresh=False,
)
