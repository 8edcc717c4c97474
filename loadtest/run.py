#!/usr/bin/env python3
"""Runs the load test that its argument describes and prints the measurements; started by `twofold loadtest`.

    python loadtest/run.py PLAN        # PLAN: a LoadTestPlan as JSON

During the run, samples go to the server's telemetry database (the dashboard's page "Load tests") or, where the server
has no telemetry, to a JSON-lines file. When the time is over, answers in progress are completed. Exit code: 0; 1 when a
request failed, none was answered or an objective was missed; 2 for a server that may not be loaded or is absent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gevent

# Locust patches the standard library for its green threads, so it is imported first.
import locust
from gevent.event import Event
from locust.env import Environment
from locust.runners import MasterRunner, Runner
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan
from twofold.tools.loadgen.metrics import Run, span_s
from twofold.tools.loadgen.report import as_json, objectives, stage_table, table

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest import locustfile  # noqa: E402
from loadtest.distributed import SpreadError, runner_of, work  # noqa: E402
from loadtest.state import LoadTest, UnreachableError, describe, prepare  # noqa: E402
from loadtest.workers import Workers  # noqa: E402


def main() -> int:
    plan = LoadTestPlan.from_json(sys.argv[1])
    environment = Environment(
        user_classes=_every_class(plan), events=locustfile.events, shape_class=locustfile.StagedShape()
    )
    environment.stop_timeout = locustfile.DRAIN_S
    environment.is_planned = True
    try:
        if plan.spread.role == "worker":
            return work(plan, environment, _user_classes)
        with runner_of(environment, plan) as runner:
            environment.loadtest_workers = Workers(runner)
            return _run(environment, runner, prepare(environment, plan, plan.mix))
    except (ConfigError, SpreadError, UnreachableError) as error:
        print(f"twofold loadtest: {error}", file=sys.stderr)
        return 2


def _run(environment: Environment, runner: Runner, test: LoadTest) -> int:
    plan = test.plan
    load = f"{plan.users} users" if plan.rate is None else f"{plan.rate:g} conversations per second"
    print(
        f"{load} ({', '.join(plan.mix)}; {plan.shape}) for {plan.seconds:g} s: {test.model} at {plan.host} …"
    )
    sys.stdout.flush()
    num_lost = run_users(environment, runner)
    test.store.flush()
    if num_lost:
        print(f"{num_lost} workers were lost; their last samples are missing", file=sys.stderr)
    return report(test)


def _every_class(plan: LoadTestPlan) -> list[type[locust.User]]:
    """The classes of the plan; on a worker, which gets its plan later, all of them."""
    if plan.spread.role == "worker":
        return [*locustfile.USERS.values(), locustfile.OpenLoopUser]
    return _user_classes(plan)


def _user_classes(plan: LoadTestPlan) -> list[type[locust.User]]:
    if plan.rate is not None:
        locustfile.OpenLoopUser.mix = plan.mix
        locustfile.OpenLoopUser.fixed_count = max(1, plan.spread.workers)
        return [locustfile.OpenLoopUser]
    for kind, weight in plan.mix.items():
        locustfile.USERS[kind].weight = weight
    return [locustfile.USERS[kind] for kind in plan.mix]


def run_users(environment: Environment, runner: Runner) -> int:
    """Run the plan's stages, then let running answers finish; the number of workers that were lost."""
    ended = Event()
    test: LoadTest = environment.loadtest
    test.begun_s = time.monotonic()
    helpers = [
        gevent.spawn(locustfile.pass_samples_on, environment, ended),
        gevent.spawn(show_progress, test, ended),
    ]
    try:
        runner.start_shape()
        gevent.sleep(test.plan.seconds)
    except KeyboardInterrupt:
        print("\nended early", flush=True)
    num_lost = 0
    if isinstance(runner, MasterRunner):
        num_lost = environment.loadtest_master.stop()
    else:
        runner.quit()
        runner.greenlet.join()
    ended.set()
    gevent.joinall(helpers)
    if isinstance(runner, MasterRunner) and environment.loadtest_master.problem:
        raise SpreadError(environment.loadtest_master.problem)
    return num_lost


def show_progress(test: LoadTest, ended: Event) -> None:
    what = "users" if test.plan.rate is None else "conversations"
    while not ended.wait(5):
        done = test.store.samples
        failed = sum(not sample.ok for sample in done)
        print(
            f"  {min(test.elapsed_s, test.plan.seconds):4.0f} s  {test.stage():10}  {test.workers.total():3} {what}  "
            f"{len(done):5} requests  {failed} failed",
            flush=True,
        )


def report(test: LoadTest) -> int:
    """Print the measurements and return the exit code."""
    plan, samples = test.plan, test.store.samples
    run = Run(samples, span_s(samples), plan.slos)
    figures = run.figures()
    results = [slo.check(samples) for slo in plan.slos]
    parts = [describe(test.client), table(test.workers.loadtest_id, figures, plan.slos)]
    parts += [stage_table(run)] if len(plan.user_stages) > 1 or len(plan.mix) > 1 else []
    parts += [objectives(results)] if results else []
    print("\n" + "\n\n".join([*parts, test.store.where()]))
    if plan.json_file:
        document = {
            "plan": json.loads(plan.to_json()),
            "objectives": [result.as_json() for result in results],
        }
        Path(plan.json_file).write_text(
            json.dumps(document | as_json(run), indent=1) + "\n", encoding="utf-8"
        )
    failed = figures["failed"] or not figures["completed"] + figures["gave_up"]
    return int(bool(failed) or not all(result.met for result in results))


if __name__ == "__main__":
    sys.exit(main())
