"""Load test page: latencies that users measured over HTTP, by the wall clock."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import formats, frame, parts
from dashboard.figures import base
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


def _chosen(view: View, tests: list[queries.LoadTest]) -> queries.LoadTest:
    """The selected test; else the latest against the view's run, else the latest of all."""
    wanted = st.session_state.get(_key())
    selected = [test for test in tests if test.loadtest_id == wanted]
    return (selected or [test for test in tests if test.run_id == view.run.run_id] or tests)[0]


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
    chosen = st.selectbox(
        "Load test",
        list(by_id),
        index=list(by_id).index(_chosen(view, tests).loadtest_id),
        format_func=lambda name: _name(by_id[name]),
        key=_key(),
    )
    test = by_id[chosen]
    if test.run_id is None:
        st.warning(
            "The run of this test was not recorded, so it is unknown whether GPU times were emulated.",
            icon=":material/help:",
        )
    samples = view.query(load_samples, chosen)
    _summary(test)
    _latencies(samples)
    with parts.card(st, "loadtest-1"):
        st.markdown("**Users**")
        parts.chart(
            base.users(samples.finished_s, samples.num_users, samples.ok),
            key="users",
            alt="Number of users and failed requests over time",
            advice="Failures from some number of users on: that is more than the server admits (--max-waiting).",
        )
    if samples.errors:
        names, counts = np.unique(samples.errors, return_counts=True)
        st.markdown("**Failures**")
        order = np.argsort(-counts)
        st.table({"failure": [str(names[i]) for i in order], "times": [int(counts[i]) for i in order]})
    if view.run.emulated and test.run_id == view.run.run_id:
        st.caption(
            "These times are real: wall-clock times of this machine, whose CPU computes what the emulated GPU would."
        )


def _summary(test: queries.LoadTest) -> None:
    seconds = max(test.end_s - test.begin_s, 1e-3)
    speed = formats.rate(test.completion_tokens / seconds)
    parts.metrics(
        Shown("Users", f"{test.max_users:,}", None),
        Shown("Answers", f"{test.num_samples - test.num_failures:,}", None),
        Shown("Failures", f"{test.num_failures:,}", None),
        Shown("Tokens/s, all users", speed, "Answer tokens received, by the users' wall clock."),
    )


def _latencies(samples: queries.LoadSamples) -> None:
    left, right = st.columns(2)
    for column, name, long_name, values in (
        (left, "TTFT", "Time to first token (TTFT), ms", samples.ttft_ms),
        (right, "TPOT", "Time per output token (TPOT), ms", samples.tpot_ms),
    ):
        with parts.card(column, name.lower()):
            st.markdown(f"**{long_name}**")
            _percentiles(values)
            series = queries.percentile_series(samples.finished_s, values, max_buckets=20)
            parts.chart(
                base.percentiles(series),
                key=name,
                alt=f"{long_name}: p50, p95 and p99 over time",
                advice="p99 far above p50: some requests wait; look for them on Requests.",
            )


def _percentiles(values: np.ndarray) -> None:
    known = values[~np.isnan(values)]
    for column, percentile in zip(st.columns(3), (50, 95, 99), strict=True):
        value = float(np.percentile(known, percentile)) if len(known) else None
        column.metric(f"p{percentile}", formats.milliseconds(value))


def _name(test: queries.LoadTest) -> str:
    return f"{formats.moment(test.begin_s, with_date=True)} · {test.max_users} users · {test.num_samples} requests"


frame.live_page(
    "Load tests",
    "Latencies of concurrent chat users: time to first token (TTFT) and time per output token (TPOT).",
    body,
    subject=subject,
)
