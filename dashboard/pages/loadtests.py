"""Load tests page: what users measured over HTTP, by the wall clock, beside the engine's cache and link."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, links, parts
from dashboard.figures import loadtest as figures
from dashboard.parts import Shown
from dashboard.view import NEWEST, View


def load_tests(db: queries.Database, run: queries.Run) -> list[queries.LoadTest]:
    """Load tests of all runs: a test is listed without knowing which run it was made against."""
    return queries.load_tests(db)


def load_samples(db: queries.Database, run: queries.Run, loadtest_id: str) -> queries.LoadSamples:
    return queries.load_samples(db, loadtest_id)


def subject(view: View) -> View | None:
    """The run that the test was made against, which may differ from the sidebar's run."""
    tests = view.query(load_tests)
    run_id = _chosen(view, tests).run_id if tests else view.run.run_id
    if run_id == view.run.run_id:
        return view
    found = [run for run in queries.runs(view.db, limit=1_000_000) if run.run_id == run_id]
    return view.of(found[0]) if found else None


def _key() -> str:
    """Session key of the selected test; one per sidebar run, so that choosing a run shows its latest test."""
    return f"loadtest-{st.session_state.get('run', NEWEST)}"


def _latest(view: View, tests: list[queries.LoadTest]) -> queries.LoadTest:
    """The latest test against the view's run, else the latest of all."""
    return ([test for test in tests if test.run_id == view.run.run_id] or tests)[0]


def _chosen(view: View, tests: list[queries.LoadTest]) -> queries.LoadTest:
    """The selected test, else that of the address, else the latest."""
    wanted = st.session_state.get(_key(), links.requested("loadtest"))
    selected = [test for test in tests if test.loadtest_id == wanted]
    return selected[0] if selected else _latest(view, tests)


def body(view: View) -> None:
    tests = view.query(load_tests)
    if not tests:
        st.info(
            "No load test has been run against this server yet. Start one and watch it here:",
            icon=":material/groups:",
        )
        st.code("make loadtest    # ten users chat for a minute", language="bash")
        return
    by_id = {test.loadtest_id: test for test in tests}
    if not links.adopt("loadtest", _key(), by_id):
        st.warning(
            f"Load test {links.requested('loadtest')} is not in this database.", icon=":material/search_off:"
        )
    st.session_state.setdefault(_key(), _latest(view, tests).loadtest_id)
    chosen = st.selectbox("Load test", list(by_id), format_func=lambda name: _name(by_id[name]), key=_key())
    links.publish("loadtest", chosen if len(tests) > 1 else None)
    test = by_id[chosen]
    if test.run_id is None:
        st.warning(
            "The run of this test was not recorded, so it is unknown whether GPU times were emulated.",
            icon=":material/help:",
        )
    samples = view.query(load_samples, chosen)
    _summary(test)
    _latencies(samples)
    _timeline(view, test, samples)
    _failures(samples)
    if view.run.emulated and test.run_id == view.run.run_id:
        st.caption(
            "These times are real: wall-clock times of this machine, whose CPU computes what the emulated GPU would."
        )


def _summary(test: queries.LoadTest) -> None:
    seconds = max(test.end_s - test.begin_s, 1e-3)
    speed = formats.rate(test.completion_tokens / seconds)
    parts.metrics(
        Shown("Users", f"{test.max_users:,}"),
        Shown("Answers", f"{test.num_samples - test.num_failures:,}"),
        Shown("Failures", f"{test.num_failures:,}"),
        Shown("Tokens/s, all users", speed, "Answer tokens received, by the users' wall clock."),
    )


def _latencies(samples: queries.LoadSamples) -> None:
    """Percentiles of the whole test as a table: one row per latency."""
    rows = {
        "time to first token (TTFT)": samples.ttft_ms,
        "time per output token (TPOT)": samples.tpot_ms,
        "end to end (E2E)": np.where(samples.ok, samples.e2e_ms, np.nan),
    }
    with parts.card(st, "loadtest-latencies"):
        parts.table(
            ["latency, wall clock", "p50", "p95", "p99"],
            [[name, *map(formats.milliseconds, _percentiles(values))] for name, values in rows.items()],
            name="Latencies of the whole test",
        )


def _percentiles(values: np.ndarray) -> list[float | None]:
    known = values[~np.isnan(values)]
    return [float(np.percentile(known, each)) if len(known) else None for each in (50, 95, 99)]


def _timeline(view: View, test: queries.LoadTest, samples: queries.LoadSamples) -> None:
    overview = None
    if test.run_id == view.run.run_id:
        span = queries.Window(int(test.begin_s), max(int(test.end_s), int(test.begin_s) + 1))
        overview = view.overview(span)
    with parts.card(st, "loadtest-1", "The test over time"):
        parts.chart(
            figures.timeline(samples, overview),
            key="timeline",
            alt="Users, failures, TTFT, TPOT, hit rate and PCIe rate over the test",
            advice="Where TTFT leaves its level while users rise is the server's capacity. Failures: --max-waiting. "
            "A hit rate that falls with users: more slots.",
        )


def _failures(samples: queries.LoadSamples) -> None:
    if not samples.errors:
        return
    names, counts = np.unique(samples.errors, return_counts=True)
    order = np.argsort(-counts)
    parts.table(["failure", "times"], [[str(names[i]), f"{counts[i]:,}"] for i in order], name="Failures")


def _name(test: queries.LoadTest) -> str:
    return f"{formats.moment(test.begin_s, with_date=True)} · {test.max_users} users · {test.num_samples} requests"


frame.live_page(
    "Load tests",
    "What concurrent users felt: time to first token (TTFT), time per output token (TPOT) and failures.",
    body,
    subject=subject,
)
