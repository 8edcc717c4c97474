"""Fleet page: replicas, the router's decisions, prefix hits and hottest experts by replica, requests by trace id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import fleet as figures
from dashboard.parts import Shown
from dashboard.view import REFRESH_S, View, chosen_window

# Replicas whose experts are read, newest first: each takes as long as Placement.
_MAX_SHOWN = 8
_NUM_HOTTEST = 5
_REASONS: Final[dict[queries.RoutedBy, str]] = {"prefix": "by prefix", "load": "by load", "retry": "retried"}


def body(view: View) -> None:
    now_s = (
        time.time() // REFRESH_S * REFRESH_S
    )  # the same for all viewers, so that they share cached results
    members = view.query(queries.fleet_runs)
    window = chosen_window()
    if not isinstance(window, queries.Window):
        view = replace(view, span=queries.fleet_window(members, window, now_s=now_s))
    replicas = view.query(queries.fleet, view.span)
    every = [replica.total for replica in replicas]
    num_requests, prompt = sum(each.num_requests for each in every), sum(each.prompt_tokens for each in every)
    reasons = [reason for reason in figures.REASONS if any(reason in each.decided for each in replicas)]
    retried = sum(each.decided.get("retry", queries.Decided()).num_requests for each in replicas)
    lost = [each for each in replicas if each.run.state() == "interrupted"]
    what = "Replicas" if view.run.replica else "Servers"
    parts.metrics(
        Shown(what, f"{sum(each.run.is_live() for each in replicas):,} of {len(replicas):,} live"),
        *(
            [Shown("Lost", f"{len(lost):,}", "Ended without shutting down: crash, kill, power loss.")]
            if lost
            else []
        ),
        Shown("Requests", f"{num_requests:,}", "Of all rows below, submitted in the window."),
        Shown("Answer tokens", f"{sum(each.completion_tokens for each in every):,}", "Of these requests."),
        Shown(
            "Prefix hits",
            formats.percent(sum(each.cached_tokens for each in every) / prompt if prompt else None),
            "Prompt tokens that hit a prefix cache, of all rows below.",
        ),
        *(
            [Shown("Retried", f"{retried:,}", "Requests whose first replica was lost before it answered.")]
            if reasons
            else []
        ),
    )
    _replicas(replicas, reasons, what)
    if reasons:
        with parts.card(st, "fleet-2", "Routing decisions"):
            parts.chart(
                figures.decisions(replicas),
                key="decisions",
                alt="Requests by replica and reason of the router's choice",
                advice="Many by load: conversations are new, or leave a replica with a much longer queue.",
            )
    _experts(view, [replica.run for replica in replicas])
    _followed(view, [replica.run for replica in replicas])


def _replicas(
    replicas: Sequence[queries.FleetReplica], reasons: Sequence[queries.RoutedBy], what: str
) -> None:
    """A row per server; columns of the router's choices only where it chose for that reason."""
    models = len({each.run.model for each in replicas}) > 1
    head = [
        what.lower().removesuffix("s"),
        *(["model"] if models else []),
        "host",
        "state",
        "running",
        "requests",
    ]
    head += [_REASONS[reason] for reason in reasons]
    head += ["prefix hits", "answer tokens"]
    rows = [
        [
            _name(each.run),
            *([formats.last_part(each.run.model)] if models else []),
            each.run.host,
            each.run.state(),
            _running(each),
            f"{each.total.num_requests:,}",
            *(f"{each.decided.get(reason, queries.Decided()).num_requests:,}" for reason in reasons),
            formats.percent(each.hit_share),
            f"{each.total.completion_tokens:,}",
        ]
        for each in replicas
    ]
    with parts.card(st, "fleet-1"):
        parts.table(head, rows, name=what, texts=range(head.index("running")))


def _running(replica: queries.FleetReplica) -> str:
    """Requests in progress; those that a lost replica left."""
    count, state = replica.num_unfinished, replica.run.state()
    if state == "interrupted" and count:
        return f"{count:,} lost"
    return f"{count:,}" if state == "live" else formats.NOTHING


def _experts(view: View, runs: Sequence[queries.Run]) -> None:
    if not parts.has_level(view, "layer"):
        return
    shown = list(runs)[-_MAX_SHOWN:]
    rows = [[_name(run), *_hottest(view.of_run(run))] for run in shown]
    head = ["replica" if view.run.replica else "server"]
    head += [f"{place}." for place in range(1, _NUM_HOTTEST + 1)]
    rest = f" Only the newest {len(shown):,} of {len(runs):,}." if len(shown) < len(runs) else ""
    advice = " Replicas with different experts serve different kinds of prompts." if len(runs) > 1 else ""
    with parts.card(st, "fleet-3"):
        parts.table(head, rows, name="Hottest experts", texts=range(len(head)))
        st.caption(f"Layer, expert and share of the layer's uses, in the window.{rest}{advice}")


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
    return run.replica or run.run_name or f"run {run.run_id}"


frame.live_page(
    "Fleet",
    "The replicas behind one address, or the servers that share this database: who serves what, and why the router "
    "chose them. The window is that of all of them.",
    body,
)
