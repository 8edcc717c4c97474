"""Fleet page: replicas, the router's decisions, prefix hits and hottest experts by replica, requests by trace id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import fleet as figures
from dashboard.parts import Shown
from dashboard.view import View

# Replicas whose experts are read, newest first: each takes as long as Placement.
_MAX_SHOWN = 8
_NUM_HOTTEST = 5


def body(view: View) -> None:
    replicas = view.query(queries.fleet, view.span)
    every = [replica.total for replica in replicas]
    num_requests, prompt = sum(each.num_requests for each in every), sum(each.prompt_tokens for each in every)
    retried = sum(each.decided.get("retry", queries.Decided()).num_requests for each in replicas)
    parts.metrics(
        Shown("Replicas", f"{sum(each.run.is_live() for each in replicas):,} of {len(replicas):,} live"),
        Shown("Requests", f"{num_requests:,}", "Of all replicas, submitted in the window."),
        Shown("Answer tokens", f"{sum(each.completion_tokens for each in every):,}", "Of these requests."),
        Shown(
            "Prefix hits",
            formats.percent(sum(each.cached_tokens for each in every) / prompt if prompt else None),
            "Prompt tokens that hit a prefix cache, of all replicas.",
        ),
        Shown("Retried", f"{retried:,}", "Requests whose first replica was lost before it answered."),
    )
    _replicas(replicas)
    if any(reason for each in replicas for reason in each.decided):
        with parts.card(st, "fleet-2", "Routing decisions"):
            parts.chart(
                figures.decisions(replicas),
                key="decisions",
                alt="Requests by replica and reason of the router's choice",
                advice="Many by load: conversations are new, or leave a replica with a much longer queue.",
            )
    _experts(view, [replica.run for replica in replicas])
    _followed(view, [replica.run for replica in replicas])


def _replicas(replicas: Sequence[queries.FleetReplica]) -> None:
    head = [
        "replica",
        "host",
        "state",
        "running",
        "requests",
        "by prefix",
        "by load",
        "retried",
        "prefix hits",
        "answer tokens",
    ]
    rows = [
        [
            _name(each.run),
            each.run.host,
            each.run.state(),
            f"{each.num_unfinished:,}" if each.run.is_live() else formats.NOTHING,
            f"{each.total.num_requests:,}",
            *(f"{each.decided.get(reason, queries.Decided()).num_requests:,}" for reason in figures.REASONS),
            formats.percent(each.hit_share),
            f"{each.total.completion_tokens:,}",
        ]
        for each in replicas
    ]
    with parts.card(st, "fleet-1"):
        parts.table(head, rows, name="Replicas", texts=(0, 1, 2))


def _experts(view: View, runs: Sequence[queries.Run]) -> None:
    if not parts.has_level(view, "layer"):
        return
    shown = list(runs)[-_MAX_SHOWN:]
    rows = [[_name(run), *_hottest(view.of_run(run))] for run in shown]
    head = ["replica", *(f"{place}." for place in range(1, _NUM_HOTTEST + 1))]
    with parts.card(st, "fleet-3"):
        parts.table(head, rows, name="Hottest experts", texts=range(len(head)))
        st.caption(
            f"Layer, expert and share of the layer's uses, in the window. Of {len(runs):,} replicas the newest "
            f"{len(shown):,}. Replicas with different experts serve different kinds of prompts."
        )


def _hottest(view: View) -> list[str]:
    """The experts with the largest shares of their layers' uses, largest first."""
    total = view.placements()[0].total
    share = total / np.maximum(1, total.sum(axis=1))[:, None]
    order = np.argsort(-share, axis=None, kind="stable")[:_NUM_HOTTEST]
    found = [
        (int(layer), int(expert)) for layer, expert in zip(*np.unravel_index(order, share.shape), strict=True)
    ]
    cells = [
        f"L{layer} E{expert}, {share[layer, expert]:.1%}" for layer, expert in found if total[layer, expert]
    ]
    return cells + [formats.NOTHING] * (_NUM_HOTTEST - len(cells))


def _followed(view: View, runs: Sequence[queries.Run]) -> None:
    """A request that is looked for by its trace, wherever it ran."""
    wanted = st.text_input(
        "Trace id", placeholder="32 hexadecimal digits of the answer's traceresponse header", key="trace"
    )
    if not wanted:
        return
    found = queries.traced(view.db, wanted)
    if not found:
        parts.note("No request came with this trace id.")
        return
    by_id = {run.run_id: _name(run) for run in runs}
    rows = []
    for request in found:
        ttft, _, e2e = queries.times_at_client(request)
        rows.append(
            [
                by_id.get(request.run_id, f"run {request.run_id}"),
                f"{request.number:,}",
                request.routed_by or "no router",
                formats.moment(request.received_s, with_date=True),
                formats.seconds(ttft),
                formats.seconds(e2e),
                f"{request.prompt_tokens:,}",
                f"{request.cached_tokens:,}",
                request.finish_reason or queries.RUNNING,
            ]
        )
    head = ["replica", "request", "chosen by", "received", "TTFT", "E2E", "prompt", "cached", "ended by"]
    parts.table(head, rows, name="Requests of this trace", texts=(0, 2, 8))


def _name(run: queries.Run) -> str:
    return run.replica or run.host or f"run {run.run_id}"


frame.live_page(
    "Fleet", "The replicas behind one address: who serves what, and why the router chose them.", body
)
