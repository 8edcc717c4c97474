"""Compare page: a run beside up to seven others, and how sure their differences are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, links, parts
from dashboard.controls import run_name
from dashboard.figures import comparison as figures
from dashboard.view import View

_MAX_OTHERS: Final = 7
_MAX_LISTED: Final = 1000
# How each quantity is written, and whether more is better.
QUANTITIES: Final[dict[str, tuple[Callable[[float], str], bool]]] = {
    "TTFT": (formats.seconds, False),
    "TPOT": (formats.seconds, False),
    "E2E": (formats.seconds, False),
    "decode tokens/s": (formats.rate, True),
    "hit rate": (formats.percent, True),
    "PCIe bytes per second": (formats.link_rate, False),
}


def body(view: View) -> None:
    runs = {run.run_id: run for run in queries.runs(view.db, limit=_MAX_LISTED)}
    if len(runs) < 2:
        parts.note(
            "This database has one run. Start the server again with other settings to compare the two. "
            "`serve --run-name NAME --run-tag TAG` tells runs apart."
        )
        return
    chosen = _choose(view.run, runs)
    if not chosen:
        parts.note("Choose the runs that this one is compared with.")
        return
    others = [view.of(runs[number]) for number in chosen]
    this = view.of(view.run)
    every = [*others, this]
    if len({each.run.emulated for each in every}) > 1:
        st.caption(
            "One of the two runs is emulated: compare only their hit rates, not their times."
            if len(every) == 2
            else "Some of these runs are emulated: compare only their hit rates with the others', not their times."
        )
    series = {each.run.run_id: _series(each) for each in every}
    if len(every) > 2:
        _means(series, [each.run for each in every])
    for number in chosen:
        first, second = series[number], series[this.run.run_id]
        found = {name: queries.difference(first[name], second[name]) for name in QUANTITIES}
        _differences(found, number, this.run.run_id)
    st.caption(
        "The interval is a percentile bootstrap of the difference of means, 2,000 resamples. "
        "It leaves out 0 where the change is called better or worse. Requests of one run share a machine and its "
        "load: repeat the runs before you rely on a small change."
    )
    _distributions(series)
    _settings([each.run for each in every])


def _choose(run: queries.Run, runs: Mapping[int, queries.Run]) -> list[int]:
    """Numbers of the runs to compare `run` with: those of the address at first, else the run before it."""
    others = [number for number in runs if number != run.run_id]
    earlier = next((number for number in others if number < run.run_id), others[0])
    key, wanted = f"other-{run.run_id}", (links.requested("other") or str(earlier)).split(",")
    if key not in st.session_state:
        st.session_state[key] = [number for number in others if str(number) in wanted][:_MAX_OTHERS]
        missing = sorted(set(wanted) - {str(number) for number in runs})
        if missing:
            st.warning(f"Run {', '.join(missing)} is not in this database.", icon=":material/search_off:")
    names = {number: run_name(each) for number, each in runs.items()}
    chosen: list[int] = st.multiselect(
        "Compare with",
        others,
        format_func=names.__getitem__,
        key=key,
        max_selections=_MAX_OTHERS,
        help=f"Up to {_MAX_OTHERS} runs. Type a part of a name or a #tag to find its runs.",
    )
    links.publish("other", ",".join(map(str, chosen)), str(earlier))
    return chosen


def _title(run: queries.Run) -> str:
    return f"run {run.run_id} {run.run_name}".rstrip()


def _means(series: Mapping[int, Mapping[str, np.ndarray]], runs: Sequence[queries.Run]) -> None:
    """Every run in a row, the sidebar's last."""
    rows = []
    for run in runs:
        own = series[run.run_id]
        known = {name: own[name][~np.isnan(own[name])] for name in QUANTITIES}
        means = [
            QUANTITIES[name][0](float(values.mean())) if len(values) else formats.NOTHING
            for name, values in known.items()
        ]
        tags = run.run_tags.replace(",", " ") or formats.NOTHING
        rows.append([_title(run), tags, f"{len(known['E2E']):,}", *means])
    with parts.card(st, "compare-means"):
        head = ["mean", "tags", "answers", *QUANTITIES]
        parts.table(head, rows, name=f"{len(runs)} runs, wall clock", texts=(0, 1))


def _series(view: View) -> dict[str, np.ndarray]:
    """Samples of a whole run by quantity: one per request, or one per bucket of time with activity."""
    at_client = view.query(queries.client_times, view.span)
    overview = view.overview(max_buckets=300)
    busy = overview.decode_tokens_per_s > 0
    return {
        "TTFT": at_client.ttft_s,
        "TPOT": at_client.tpot_s,
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
    with parts.card(st, f"compare-{first}"):
        parts.table(head, rows, name=f"Run {second} against run {first}, wall clock")


def _signed(write: Callable[[float], str], value: float) -> str:
    return f"{'−' if value < 0 else '+'}{write(abs(value))}"


def _distributions(series: Mapping[int, Mapping[str, np.ndarray]]) -> None:
    left, right = st.columns(2)
    for place, name in ((left, "TTFT"), (right, "TPOT")):
        with parts.card(place, f"compare-{name.lower()}", f"{name}, ms: share of requests at most this long"):
            parts.chart(
                figures.cumulative({number: own[name] * 1e3 for number, own in series.items()}),
                key=f"cumulative-{name}",
                alt=f"Cumulative distribution of {name} of each run",
                advice="A curve further left is faster. Curves that part only at the top differ in tail latency.",
            )


def _settings(runs: Sequence[queries.Run]) -> None:
    settings = [{**json.loads(run.config_json), **_facts(run)} for run in runs]
    changed = []
    for name in sorted({name for each in settings for name in each}):
        cells = [str(each.get(name, formats.NOTHING)) for each in settings]
        if len(set(cells)) > 1:
            changed.append([name, *cells])
    if not changed:
        which = "Both" if len(runs) == 2 else "All"
        st.caption(f"{which} runs have the same settings, version and machine.")
        return
    with parts.card(st, "compare-settings"):
        parts.table(["setting", *map(_title, runs)], changed, name="What differs between the runs")


def _facts(run: queries.Run) -> dict[str, object]:
    """Facts of the run itself; those also among the settings replace them, because they say what was chosen."""
    names = ("host", "model", "accelerator", "policy", "num_slots", "cpu_isa", "cpu_threads", "version")
    return {name: getattr(run, name) for name in names if hasattr(run, name)}


frame.live_page(
    "Compare",
    "Whole runs side by side: the run of the sidebar, and up to seven others. Wall clock everywhere.",
    body,
    refresh=False,
)
