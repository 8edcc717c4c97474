"""Requests page: a sortable table, the waterfall of one request, and the causes of its slow tokens."""

from __future__ import annotations

import base64
import json

import numpy as np
import pandas as pd
import streamlit as st
from twofold.telemetry import queries

from dashboard import explanation, formats, frame, links, parts
from dashboard.figures import request as figures
from dashboard.figures import times
from dashboard.parts import Shown
from dashboard.view import View

PAGE_SIZE = 100
ANY = "anything"
ORDERS = {
    "newest": "Newest first",
    "ttft": "Longest time to first token",
    "tpot": "Longest time per output token",
    "gap": "Longest gap between two tokens",
    "e2e": "Longest end to end",
    "prompt": "Longest prompt",
    "answer": "Longest answer",
}


def body(view: View) -> None:
    reasons = view.query(queries.finish_reasons)
    if not reasons:
        parts.note("This run has no requests yet. Send one.")
        return
    request = _choose(view, reasons)
    if request is None:
        return
    _figures(view, request)
    _pictures(request)
    _waterfall(view, request)
    if not parts.has_level(view, "expert"):
        return
    # From the last prompt token on: its step samples the first answer token.
    tokens = view.query(queries.request_tokens, request.number, first_position=request.prompt_tokens - 1)
    if not len(tokens.position):
        tokens = view.query(queries.request_tokens, request.number)
    if not len(tokens.position):
        parts.note(
            "No placements are stored for this request: not recorded yet, or deleted when the database reached its "
            "size limit."
        )
        return
    _answer(request, tokens)
    chosen = _tokens(view, request, tokens)
    _token(view, request, tokens, chosen)


def _choose(view: View, reasons: list[str]) -> queries.Request | None:
    """The request of the selected row, else that of the address, else the newest finished one; None: no match."""
    run_id = view.run.run_id
    searched, ended, sorted_by, paged = st.columns([3, 2, 3, 2])
    search = searched.text_input(
        "Search", placeholder="number, part of the request id, trace id, or adapter", key=f"search-{run_id}"
    )
    reason = ended.selectbox("Ended by", [ANY, *reasons], key=f"ended-{run_id}")
    order = sorted_by.selectbox("Sort", list(ORDERS), format_func=ORDERS.__getitem__, key=f"sort-{run_id}")
    like = {"search": search} | ({} if reason == ANY else {"ended_by": reason})
    found = view.query(queries.num_requests, **like)
    num_pages = max(1, -(-found // PAGE_SIZE))
    page = paged.number_input(
        f"Page of {num_pages:,} ({found:,} requests)",
        min_value=1,
        max_value=num_pages,
        key=f"page-{run_id}-{search}-{reason}",
    )
    offset = (page - 1) * PAGE_SIZE
    listed = view.query(queries.sorted_requests, order=order, **like, limit=PAGE_SIZE, offset=offset)
    if not listed:
        st.info("No requests match the filter.", icon=":material/search_off:")
        return None
    event = st.dataframe(
        _table(listed),
        column_config=_columns(),
        hide_index=True,
        height=min(35 * len(listed) + 38, 300),
        on_select="rerun",
        selection_mode="single-row",
        key=f"requests-{run_id}-{search}-{reason}-{order}-{page}",
    )
    st.caption(
        "Select a row to see its request below. A click on a column's name sorts this page of the table."
    )
    if event.selection.rows:
        chosen = listed[event.selection.rows[0]]
        links.publish("request", chosen.number)
        return chosen
    return _linked(view) or next((each for each in listed if each.finish_reason), listed[0])


def _linked(view: View) -> queries.Request | None:
    """The request that the address names; None if it names none of this run."""
    wanted = links.requested("request")
    if wanted is None:
        return None
    found = view.query(queries.request, int(wanted)) if wanted.isascii() and wanted.isdigit() else None
    if found is None:
        st.warning(f"Request {wanted} is not in this run; another is shown.", icon=":material/search_off:")
    return found


def _table(listed: list[queries.Request]) -> pd.DataFrame:
    at_client = [queries.times_at_client(request) for request in listed]
    milliseconds = [[None if value is None else value * 1e3 for value in row] for row in at_client]
    table = pd.DataFrame(
        {
            "number": [request.number for request in listed],
            "submitted": [formats.moment(request.submitted_s) for request in listed],
            "TTFT": [row[0] for row in milliseconds],
            "TPOT": [row[1] for row in milliseconds],
            "gap": [None if each.longest_gap_s is None else each.longest_gap_s * 1e3 for each in listed],
            "E2E": [row[2] for row in milliseconds],
            "prompt": [request.prompt_tokens for request in listed],
            "cached": [request.cached_tokens for request in listed],
            "answer": [request.completion_tokens for request in listed],
            "ended by": [request.finish_reason or queries.RUNNING for request in listed],
            "id": [request.request_id for request in listed],
        }
    )
    if any(request.accepted_tokens + request.rejected_tokens for request in listed):
        table["accepted"] = [request.accepted_tokens for request in listed]
        table["rejected"] = [request.rejected_tokens for request in listed]
    if any(request.adapter for request in listed):
        table["adapter"] = [request.adapter for request in listed]
    return table


def _columns() -> dict[str, object]:
    number = st.column_config.NumberColumn
    return {
        "number": number("no.", width="small", pinned=True),
        "TTFT": number("TTFT, ms", format="%.1f", help="Time to first token, wall clock."),
        "TPOT": number("TPOT, ms", format="%.2f", help="Time per output token, wall clock."),
        "gap": number(
            "longest gap, ms", format="%.1f", help="Longest time from one token to the next, wall clock."
        ),
        "E2E": number("E2E, ms", format="%.0f", help="From begin to end, wall clock."),
        "prompt": number("prompt tokens"),
        "cached": number("cached", help="Prompt tokens that hit the prefix cache."),
        "answer": number("answer tokens"),
        "accepted": number("accepted drafts", help="Drafted tokens that became part of the answer."),
        "adapter": st.column_config.TextColumn(help="LoRA adapter; the search takes its name."),
        "rejected": number("rejected drafts", help="Drafted tokens that were computed in vain."),
    }


def _figures(view: View, request: queries.Request) -> None:
    ttft, tpot, e2e = queries.times_at_client(request)
    further = request.completion_tokens - 1
    clock = (None, None)
    if view.run.emulated:
        per_token = request.decode_s / further if further > 0 else None
        clock = (
            f"{formats.seconds(request.queue_s + request.prefill_s)} emulated",
            f"{formats.seconds(per_token)} emulated",
        )
    drafted = request.accepted_tokens + request.rejected_tokens
    drafts = (
        [Shown("Drafts accepted", f"{request.accepted_tokens:,}", None, f"of {drafted:,}")] if drafted else []
    )
    megapixels = request.picture_pixels / 1e6
    pictures = (
        [
            Shown(
                "Pictures",
                f"{request.num_pictures:,}",
                f"{megapixels:.1f} megapixels as sent",
                f"{request.image_tokens:,} tokens",
            )
        ]
        if request.num_pictures
        else []
    )
    st.markdown(f"**Request {request.number}** `{request.request_id}`")
    parts.metrics(
        Shown("TTFT", formats.seconds(ttft), "Time to first token, wall clock.", clock[0]),
        Shown("TPOT", formats.seconds(tpot), "Time per output token, wall clock.", clock[1]),
        Shown("E2E", formats.seconds(e2e), "From the request's begin to its end, wall clock."),
        Shown("Prompt tokens", f"{request.prompt_tokens:,}", None, f"{request.cached_tokens:,} cached"),
        *pictures,
        Shown("Answer tokens", f"{request.completion_tokens:,}"),
        *drafts,
        Shown("Ended by", request.finish_reason or "still running"),
    )


def _pictures(request: queries.Request) -> None:
    """Small views of the prompt's pictures; nothing where texts were not recorded."""
    files = [base64.b64decode(each) for each in json.loads(request.pictures_json or "[]")]
    if not files:
        return
    with parts.card(st, "pictures", "Pictures of the prompt"):
        st.image(files, caption=[f"picture {number}" for number in range(1, len(files) + 1)])


def _waterfall(view: View, request: queries.Request) -> None:
    found = queries.waterfall(request)
    if not found:
        return
    with parts.card(st, "waterfall", "Where the request's time went"):
        note = ""
        if view.run.emulated:
            note = (
                f"On the emulated clock: {formats.seconds(request.queue_s)} in the queue, "
                f"{formats.seconds(request.prefill_s)} prefill, {formats.seconds(request.decode_s)} decode."
            )
        parts.chart(
            times.waterfall(found),
            key="waterfall-chart",
            alt="; ".join(f"{part.name} {formats.seconds(part.duration_s)}" for part in found),
            advice="Long queue: --max-num-seqs. Long prefill: shorter prompts or a common prefix. "
            "Long decode: look at its tokens below.",
            note=note,
        )


def _tokens(view: View, request: queries.Request, tokens: queries.RequestTokens) -> int:
    """Draw the answer's tokens; returns the index of the chosen one."""
    with parts.card(st, "requests-1", "Step time of each token"):
        step_us, unit, is_emulated = _clock(view, tokens)
        chosen = _choose_token(view, request, tokens, step_us)
        # Several tokens of one step have its parts each.
        steps, of_token = np.unique(tokens.step, return_inverse=True)
        by_part = view.query(queries.parts_of_steps, tuple(steps.tolist()), emulated=is_emulated)
        by_part = {name: values[of_token] for name, values in by_part.items()}
        misses = tokens.num_by_placement[:, :, [queries.Placement.CPU, queries.Placement.FETCHED]]
        parts.chart(
            figures.token_times(tokens.position, by_part, misses.sum(axis=(1, 2)), chosen, unit=unit),
            key="tokens",
            alt="Step time of each token of the answer, stacked by part",
            advice="Select a high bar with the slider: the causes are listed below.",
        )
    with parts.card(st, "requests-2", "Misses by token and layer"):
        parts.chart(
            figures.token_layer_misses(tokens.position, tokens.num_by_placement),
            key="misses",
            alt="Heatmap of tokens and layers: routed experts that were not on the GPU",
            advice="A dark column is a slow token; a dark row is a layer whose slots are too few.",
        )
    return chosen


def _answer(request: queries.Request, tokens: queries.RequestTokens) -> None:
    """The answer's text, each token as dark as it had misses; nothing where texts were not recorded."""
    if request.answer_json is None:
        st.caption("The answer's text was not recorded: `--telemetry-text` records it (private data).")
        return
    with parts.card(st, "answer", "The answer, coloured by misses"):
        st.html(explanation.coloured_answer(request, tokens))
        st.html(
            '<p class="tf-advice"><b aria-hidden="true">→</b> Dark words cost most: topics whose experts are '
            "seldom used. Recorded with --telemetry-text; only the first tokens of a long answer are kept.</p>"
        )


def _clock(view: View, tokens: queries.RequestTokens) -> tuple[np.ndarray, str, bool]:
    """Step times in microseconds by the clock that the viewer chose, the chart's unit, and whether it is emulated."""
    if not view.run.emulated:
        return tokens.wall_us, "ms", False
    clocks = {"Wall clock": tokens.wall_us, "Emulated clock": tokens.step_us}
    name = st.segmented_control("Clock", list(clocks), default="Wall clock", key="clock") or "Wall clock"
    is_emulated = name == "Emulated clock"
    return clocks[name], "emulated ms" if is_emulated else "ms", is_emulated


def _choose_token(
    view: View, request: queries.Request, tokens: queries.RequestTokens, step_us: np.ndarray
) -> int:
    positions = tokens.position.tolist()
    if len(positions) == 1:
        return 0
    # Not the first one: its step includes the prefill.
    slowest = positions[1 + int(np.argmax(np.nan_to_num(step_us[1:])))]
    key = f"token-{view.run.run_id}-{request.number}"
    links.adopt("token", key, positions, instead="the slowest token is shown")
    st.session_state.setdefault(key, slowest)
    position = st.select_slider("Token to explain (the slowest one first)", positions, key=key)
    links.publish("token", position, slowest)
    return positions.index(position)


def _token(view: View, request: queries.Request, tokens: queries.RequestTokens, chosen: int) -> None:
    step = int(tokens.step[chosen])
    uploads = view.query(queries.uploads, first_step=step, last_step=step)
    with parts.card(
        st, "requests-3", f"Why the token at position {int(tokens.position[chosen])} took this long"
    ):
        steps = tuple(np.unique(tokens.step).tolist())
        of_step = view.query(queries.figures_of_steps, steps, step)
        reasons = explanation.sentences(tokens, chosen, uploads, emulated=view.run.emulated, figures=of_step)
        st.markdown("\n".join(f"- {reason}" for reason in reasons))
        first = int(tokens.position[chosen]) < request.prompt_tokens
        bars = explanation.step_time_bars(of_step, request.queue_s if first else None)
        parts.wide(bars, "Step time by part")
        _layers_and_uploads(view, tokens, chosen, uploads)
        shared = int(tokens.batch_tokens[chosen])
        st.caption(
            "Experts: this token's, by router weight (the small figure), coloured by where they ran. "
            f"Times: the whole layer in this step, for all {shared:,} tokens of its batch."
        )
        parts.placement_key()
        table = explanation.layer_table(tokens, chosen, emulated=view.run.emulated)
        parts.wide(table, "Experts by layer")


def _layers_and_uploads(
    view: View, tokens: queries.RequestTokens, chosen: int, uploads: list[queries.Upload]
) -> None:
    # On a virtual clock a layer takes the predicted time by construction: nothing to compare.
    predicted = None if view.run.emulated else tokens.predicted_us[chosen]
    measured = (values[chosen] for values in (tokens.layer_us, tokens.cpu_us, tokens.gpu_us))
    left, right = st.columns([3, 2]) if view.run.has_slots else (st.container(), None)
    with left:
        st.caption(f"Time of each layer in this step, all its tokens together{view.emulated}")
        parts.chart(
            figures.layer_times(*measured, predicted),
            key="layers",
            alt="CPU time, GPU time and layer time of each MoE layer",
            advice="A layer far above the others holds the step up: look at its experts below.",
        )
    if right is None:
        return
    with right:
        step = int(tokens.step[chosen])
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


frame.live_page(
    "Requests",
    "Every request of the run, as its client felt it. Select one: its slowest token is explained below.",
    body,
    refresh=False,
)
