"""Load test: what users saw, over HTTP, by their own wall clock."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import figures, formats, frame


def body(view: frame.View) -> None:
    tests = queries.load_tests(view.db)
    if not tests:
        st.info(
            "No load test has been run against this server yet. Start one and watch it here:",
            icon=":material/groups:",
        )
        st.code("make loadtest    # ten users chat for a minute", language="bash")
        return
    by_id = {test.loadtest_id: test for test in tests}
    chosen = st.selectbox(
        "Load test", list(by_id), format_func=lambda name: _name(by_id[name]), key="loadtest"
    )
    test = by_id[chosen]
    samples = queries.load_samples(view.db, chosen)
    seconds = max(test.end_s - test.begin_s, 1e-3)
    users, answered, failed, speed = st.container(key="figures").columns(4)
    users.metric("Users", f"{test.max_users:,}", border=True)
    answered.metric("Answers", f"{test.num_samples - test.num_failures:,}", border=True)
    failed.metric("Failures", f"{test.num_failures:,}", border=True)
    speed.metric(
        "Tokens/s, all users",
        formats.rate(test.completion_tokens / seconds),
        help="Answer tokens received, by the users' wall clock.",
        border=True,
    )
    left, right = st.columns(2)
    for column, name, long_name, values in (
        (left, "TTFT", "Time to first token (TTFT), ms", samples.ttft_ms),
        (right, "TPOT", "Time per further token (TPOT), ms", samples.tpot_ms),
    ):
        with frame.card(column, name.lower()):
            st.markdown(f"**{long_name}**")
            _percentiles(values)
            series = queries.percentile_series(samples.finished_s, values, max_buckets=20)
            frame.chart(
                figures.percentiles(series),
                key=name,
            )
    with frame.card(st, "loadtest-1"):
        st.markdown("**Users**")
        frame.chart(figures.users(samples.finished_s, samples.num_users, samples.ok), key="users")
    if samples.errors:
        names, counts = np.unique(samples.errors, return_counts=True)
        st.markdown("**Failures**")
        order = np.argsort(-counts)
        st.table({"failure": [str(names[i]) for i in order], "times": [int(counts[i]) for i in order]})
    if view.run.emulated:
        st.caption(
            "These times are real: wall-clock times of this machine, which computes on its CPU what the emulated "
            "GPU would."
        )


def _percentiles(values: np.ndarray) -> None:
    known = values[~np.isnan(values)]
    for column, percentile in zip(st.columns(3), (50, 95, 99), strict=True):
        value = float(np.percentile(known, percentile)) if len(known) else None
        column.metric(f"p{percentile}", formats.milliseconds(value))


def _name(test: queries.LoadTest) -> str:
    return f"{formats.moment(test.begin_s, with_date=True)} · {test.max_users} users · {test.num_samples} requests"


frame.live_page(
    "Load test",
    "Users who chat at the same time: how long until the first token, how long for each further one?",
    body,
)
