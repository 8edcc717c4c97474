"""Compare page: two runs side by side, and how sure their differences are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, links, parts
from dashboard.controls import run_name
from dashboard.figures import comparison as figures
from dashboard.view import View

# How each quantity is written, and whether more is better.
QUANTITIES: Final[dict[str, tuple[Callable[[float], str], bool]]] = {
    "TTFT": (formats.seconds, False),
    "ITL": (formats.seconds, False),
    "E2E": (formats.seconds, False),
    "decode tokens/s": (formats.rate, True),
    "hit rate": (formats.percent, True),
    "PCIe bytes per second": (formats.link_rate, False),
}


def body(view: View) -> None:
    runs = queries.runs(view.db)
    if len(runs) < 2:
        parts.note(
            "This database has one run. Start the server again with other settings to compare the two."
        )
        return
    names = {run.run_id: run_name(run) for run in runs}
    others = [run.run_id for run in runs if run.run_id != view.run.run_id]
    key = f"other-{view.run.run_id}"
    links.adopt("other", key, others)
    earlier = next((number for number in others if number < view.run.run_id), others[0])
    st.session_state.setdefault(key, earlier)
    number = st.selectbox("Compare with", others, format_func=names.__getitem__, key=key)
    links.publish("other", number, earlier)
    other = view.of(next(run for run in runs if run.run_id == number))
    this = view.of(view.run)
    if this.run.emulated != other.run.emulated:
        st.caption("One of the two runs is emulated: compare only their hit rates, not their times.")
    first, second = _series(other), _series(this)
    found = {name: queries.difference(first[name], second[name]) for name in QUANTITIES}
    _differences(found, other.run.run_id, this.run.run_id)
    _distributions(first, second, (other.run.run_id, this.run.run_id))
    _settings(other.run, this.run)


def _series(view: View) -> dict[str, np.ndarray]:
    """Samples of a whole run by quantity: one per request, or one per bucket of time with activity."""
    at_client = view.query(queries.client_times, view.span)
    overview = view.overview(max_buckets=300)
    busy = overview.decode_tokens_per_s > 0
    return {
        "TTFT": at_client.ttft_s,
        "ITL": at_client.itl_s,
        "E2E": at_client.e2e_s,
        "decode tokens/s": np.where(busy, overview.decode_tokens_per_s, np.nan),
        "hit rate": overview.hit_rate if view.run.has_slots else np.full(1, np.nan),
        "PCIe bytes per second": np.where(busy & view.run.has_slots, overview.upload_bytes_per_s, np.nan),
    }


def _differences(found: dict[str, queries.Difference | None], first: int, second: int) -> None:
    rows = []
    for name, result in found.items():
        write, more_is_better = QUANTITIES[name]
        if result is None:
            rows.append([name, formats.NOTHING, formats.NOTHING, formats.NOTHING, "too few samples"])
            continue
        low, high = (_signed(write, bound) for bound in (result.low, result.high))
        better = (result.second > result.first) == more_is_better
        verdict = ("better" if better else "worse") if result.is_clear else "not clear"
        rows.append(
            [
                f"{name} (n = {result.num_first:,} and {result.num_second:,})",
                write(result.first),
                write(result.second),
                f"{low} to {high}",
                f"{result.change:+.1%}, {verdict}",
            ]
        )
    head = ["mean", f"run {first}", f"run {second}", "difference, 95 %", "change"]
    with parts.card(st, "compare-1"):
        parts.table(head, rows, name=f"Run {second} against run {first}, wall clock")
        st.caption(
            "The interval is a percentile bootstrap of the difference of means, 2,000 resamples. "
            "It leaves out 0 where the change is called better or worse. Requests of one run share a machine and its "
            "load: repeat both runs before you rely on a small change."
        )


def _signed(write: Callable[[float], str], value: float) -> str:
    return f"{'−' if value < 0 else '+'}{write(abs(value))}"


def _distributions(
    first: dict[str, np.ndarray], second: dict[str, np.ndarray], numbers: tuple[int, int]
) -> None:
    left, right = st.columns(2)
    for place, name in ((left, "TTFT"), (right, "ITL")):
        with parts.card(place, f"compare-{name.lower()}", f"{name}, ms: share of requests at most this long"):
            parts.chart(
                figures.cumulative(first[name] * 1e3, second[name] * 1e3, numbers),
                key=f"cumulative-{name}",
                alt=f"Cumulative distribution of {name} of both runs",
                advice="A curve further left is faster. Curves that part only at the top differ in tail latency.",
            )


def _settings(first: queries.Run, second: queries.Run) -> None:
    settings = [{**json.loads(run.config_json), **_facts(run)} for run in (first, second)]
    changed = [
        [name, *(str(values.get(name, formats.NOTHING)) for values in settings)]
        for name in sorted(settings[0].keys() | settings[1].keys())
        if settings[0].get(name) != settings[1].get(name)
    ]
    if not changed:
        st.caption("Both runs have the same settings, version and machine.")
        return
    head = ["setting", f"run {first.run_id}", f"run {second.run_id}"]
    with parts.card(st, "compare-settings"):
        parts.table(head, changed, name="What differs between the runs")


def _facts(run: queries.Run) -> dict[str, object]:
    """Facts of the run itself; those also among the settings replace them, because they say what was chosen."""
    names = ("host", "model", "accelerator", "policy", "num_slots", "cpu_isa", "cpu_threads", "version")
    return {name: getattr(run, name) for name in names if hasattr(run, name)}


frame.live_page(
    "Compare",
    "Two whole runs side by side: the run of the sidebar, and another. Wall clock everywhere.",
    body,
    refresh=False,
)
