"""Load tests page: what users measured over HTTP, by the wall clock, beside the engine's cache and link."""

from __future__ import annotations

from typing import Final

import numpy as np
import streamlit as st
from twofold.telemetry import queries
from twofold.tools.loadgen.slo import Slo

from dashboard import formats, frame, links, parts
from dashboard.figures import loadtest as figures
from dashboard.loadtest_result import TestPlan, TestResult, plan_of, result_of
from dashboard.parts import Shown
from dashboard.view import NEWEST, View

_LATENCIES: Final = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "end to end (E2E)",
}
_COLUMNS: Final = ("mean", "median", "p90", "p95", "p99")


def load_tests(db: queries.Database, run: queries.Run) -> list[queries.LoadTest]:
    """Load tests of all runs: a test is listed without knowing which run it was made against."""
    return queries.load_tests(db)


def load_samples(db: queries.Database, run: queries.Run, loadtest_id: str) -> queries.LoadSamples:
    return queries.load_samples(db, loadtest_id)


def load_result(
    db: queries.Database, run: queries.Run, loadtest_id: str, slos: tuple[Slo, ...]
) -> TestResult:
    return result_of(queries.load_samples(db, loadtest_id), slos)


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
    plan = plan_of(test)
    result = view.query(load_result, chosen, plan.slos)
    _summary(test, plan, result)
    _objectives(plan, result)
    _latencies(result)
    _stages(result)
    _timeline(view, test, samples)
    _failures(samples)
    if view.run.emulated and test.run_id == view.run.run_id:
        st.caption(
            "These times are real: wall-clock times of this machine, whose CPU computes what the emulated GPU would."
        )


def _summary(test: queries.LoadTest, plan: TestPlan, result: TestResult) -> None:
    figures = result.figures
    gave_up = Shown(
        "Gave up",
        f"{figures['gave_up']:,}",
        "Users who closed the connection on purpose; neither answers nor failures.",
    )
    goodput = Shown(
        "Goodput",
        f"{formats.rate(figures['request_goodput'])} requests/s",
        "Answers within every objective, per second.",
    )
    parts.metrics(
        Shown("Users", f"{test.max_users:,}"),
        Shown("Answers", f"{figures['completed']:,}", "Complete answers."),
        Shown("Failures", f"{figures['failed']:,}"),
        *([gave_up] if figures["gave_up"] else []),
        Shown(
            "Tokens/s, all users",
            formats.rate(figures["output_throughput"]),
            "Answer tokens received, by the users' wall clock.",
        ),
        Shown("Requests/s", formats.rate(figures["request_throughput"]), "Complete answers per second."),
        *([goodput] if plan.slos else []),
    )
    known = ((plan.load, "load"), (plan.mix, "mix"), (plan.shape, "shape"))
    facts = " · ".join(f"{name}: {text}" for text, name in known if text)
    st.caption(f"`{test.loadtest_id}` · {facts or 'its mix, shape and objectives were not recorded'}")


def _objectives(plan: TestPlan, result: TestResult) -> None:
    """What the test had to hold, and whether it did."""
    if not plan.slos:
        return
    rows = [
        [str(each.slo), formats.milliseconds(each.value_ms), "met" if each.met else "missed"]
        for each in result.objectives
    ]
    with parts.card(st, "loadtest-objectives"):
        missed = sum(not each.met for each in result.objectives)
        verdict = f"{missed} of {len(rows)} objectives missed" if missed else "Every objective is met"
        st.markdown(f"**{verdict}**")
        parts.table(["objective", "measured", "verdict"], rows, name="Objectives (SLO)", texts=(0, 2))


def _latencies(result: TestResult) -> None:
    """Percentiles of the whole test as a table: one row per latency."""
    with parts.card(st, "loadtest-latencies"):
        parts.table(
            ["latency, wall clock", *("p50" if each == "median" else each for each in _COLUMNS)],
            [
                [title, *(formats.milliseconds(result.figures[f"{each}_{name}_ms"]) for each in _COLUMNS)]
                for name, title in _LATENCIES.items()
            ],
            name="Latencies of the whole test",
        )


def _stages(result: TestResult) -> None:
    head = ["stage", "user", "requests", "gave up", "failed", "TTFT p50", "TTFT p95"]
    head += ["ITL p95", "E2E p95", "tokens/s"]
    rows = [
        [
            each.stage or formats.NOTHING,
            each.name or formats.NOTHING,
            *(f"{count:,}" for count in (each.num_requests, each.num_gave_up, each.num_failed)),
            *map(formats.milliseconds, (each.ttft_p50, each.ttft_p95, each.itl_p95, each.e2el_p95)),
            formats.rate(each.tokens_per_s),
        ]
        for each in result.stages
    ]
    with parts.card(st, "loadtest-stages"):
        parts.table(head, rows, name="By stage and kind of user", texts=(0, 1))


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
    shape = plan_of(test).shape
    return " · ".join(
        [
            formats.moment(test.begin_s, with_date=True),
            f"{test.max_users} users",
            f"{test.num_samples} requests",
            *([shape] if shape else []),
            test.loadtest_id,
        ]
    )


frame.live_page(
    "Load tests",
    "What concurrent users felt: time to first token (TTFT), time per output token (TPOT) and failures.",
    body,
    subject=subject,
)
