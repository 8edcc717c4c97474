"""Users of an OpenAI server for Locust: five kinds, in a closed loop by stages or in an open loop by arrivals.

`twofold loadtest` runs them without a web page and prints a summary; `twofold loadtest --ui` (or `make loadtest-ui`)
starts Locust's web page on this file.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Final

import gevent
from gevent.event import Event
from gevent.pool import Group
from locust import LoadTestShape, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_STOPPING
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan
from twofold.tools.loadgen.metrics import Sample
from twofold.tools.loadgen.shapes import SHAPES, poisson_arrivals, user_count
from twofold.tools.loadgen.slo import parse_slos
from twofold.tools.loadgen.user_kinds import USER_KINDS, parse_mix

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from loadtest.state import LoadTest, UnreachableError, prepare  # noqa: E402
from loadtest.talking import Talker  # noqa: E402
from loadtest.workers import Workers  # noqa: E402

FLUSH_INTERVAL_S: Final = 1.0
DRAIN_S: Final = 60.0
_LATE_S: Final = 10.0
"""Arrivals that are older when a worker takes the place of a lost one are not made up for."""
MAX_IN_FLIGHT: Final = 2000
"""Most conversations of an open loop at the same time; further arrivals are failures."""
_UNBOUNDED_S: Final = 3600.0
"""Duration of the stages if Locust's page gives no run time."""
_FAST: Final = 100.0
"""Users per second that start at a change of stage."""


class TwofoldUser(User):
    """A user of one kind who holds one conversation after the other."""

    abstract = True
    kind: ClassVar[str]

    def on_start(self) -> None:
        workers = self.environment.loadtest.workers
        self._talker = Talker(
            self.environment, self.kind, workers.enter(), lambda: self._state == LOCUST_STATE_STOPPING
        )

    def on_stop(self) -> None:
        self.environment.loadtest.workers.leave()

    @task
    def converse(self) -> None:
        self._talker.converse()


class ChatUser(TwofoldUser):
    kind = "chat"
    weight = 8


class LongPromptUser(TwofoldUser):
    kind = "long-prompt"


class BurstUser(TwofoldUser):
    kind = "burst"


class AgentUser(TwofoldUser):
    kind = "agent"


class ImpatientUser(TwofoldUser):
    kind = "impatient"


USERS: Final = {user.kind: user for user in (ChatUser, LongPromptUser, BurstUser, AgentUser, ImpatientUser)}


class OpenLoopUser(User):
    """Starts conversations at Poisson arrival times, whether or not earlier ones have finished."""

    fixed_count = 1
    mix: ClassVar[dict[str, int]] = {"chat": 1}

    @task
    def arrive(self) -> None:
        test: LoadTest = self.environment.loadtest
        draw = random.Random(test.plan.seed)  # noqa: S311  the same kinds in every run of the same seed
        conversations = Group()
        number, count = test.workers.share
        late_s = test.elapsed_s - _LATE_S
        for arrival, at_s in enumerate(poisson_arrivals(test.plan.arrival_stages, test.plan.seed)):
            (kind,) = draw.choices(list(self.mix), list(self.mix.values()))
            if arrival % count != number or at_s < late_s:
                continue
            while not self._is_over() and (left_s := at_s - test.elapsed_s) > 0:
                gevent.sleep(min(left_s, 0.2))
            if self._is_over():
                break
            if len(conversations) < MAX_IN_FLIGHT:
                conversations.spawn(self._converse, kind)
            else:
                test.store.add(_rejected_sample(test, kind))
        conversations.join(timeout=DRAIN_S)
        conversations.kill()
        raise StopUser

    def _converse(self, kind: str) -> None:
        workers = self.environment.loadtest.workers
        talker = Talker(self.environment, kind, workers.enter(), self._is_over)
        try:
            talker.converse()
        finally:
            workers.leave()

    def _is_over(self) -> bool:
        return bool(self._state == LOCUST_STATE_STOPPING)


def _rejected_sample(test: LoadTest, kind: str) -> Sample:
    """The failure of an arrival beyond the client's own limit."""
    message = f"{MAX_IN_FLIGHT} conversations are under way, the limit of this client"
    answer = AnswerStream(time.perf_counter())
    return Sample(
        -1, 1, answer, 0.0, "client limit", message, name=kind, stage=test.stage(), finished_s=time.time()
    )


class StagedShape(LoadTestShape):
    """Users over time by the plan's stages; one user of an open loop."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        plan = plan_of(self.runner.environment)
        users = user_count(plan.user_stages, self.get_run_time())
        if users is None:
            return None
        if list(self.runner.user_classes) == [OpenLoopUser]:
            return OpenLoopUser.fixed_count, _FAST
        return users, plan.spawn_rate if plan.shape == "constant" else _FAST


def plan_of(environment: Environment) -> LoadTestPlan:
    """The plan of `twofold loadtest`, or one made of the options of Locust's page or command line."""
    options = environment.parsed_options
    if _is_prepared(environment):
        return environment.loadtest.plan
    return LoadTestPlan(
        host=environment.host or "",
        model=options.model,
        users=options.num_users or 1,
        rate=options.arrival_rate if OpenLoopUser in environment.user_classes else None,
        shape=options.shape,
        seconds=options.run_time or _UNBOUNDED_S,
        spawn_rate=options.spawn_rate or 1.0,
        max_output_tokens=options.max_output_tokens,
        mix=_mix(environment),
        seed=options.seed,
        slos=parse_slos(options.slo),
        output=options.output,
        allow_remote_host=options.allow_remote_host,
    )


def _mix(environment: Environment) -> dict[str, int]:
    """Weights of the chosen kinds of users."""
    if OpenLoopUser in environment.user_classes:
        return OpenLoopUser.mix
    return {user.kind: int(user.weight) for user in environment.user_classes}


def _is_prepared(environment: Environment) -> bool:
    """Whether run.py has made the plan. Locust gives its workers options in any case."""
    return getattr(environment, "is_planned", False)


def pass_samples_on(environment: Environment, ended: Event) -> None:
    """Flush samples every second until `ended` is set; run in a greenlet."""
    while not ended.wait(FLUSH_INTERVAL_S):
        environment.loadtest.store.flush()


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    default = LoadTestPlan()
    parser.add_argument("--model", default="", help="model to ask for (empty: the served one)")
    parser.add_argument(
        "--shape", default=default.shape, choices=list(SHAPES), help="load over time; see the guide"
    )
    parser.add_argument(
        "--arrival-rate",
        type=float,
        default=1.0,
        help="conversations per second of OpenLoopUser, if that class is chosen",
    )
    parser.add_argument(
        "--mix",
        default="",
        include_in_web_ui=False,
        help="weights of the kinds of users, e.g. chat:8,agent:2 (default: those of their classes)",
    )
    parser.add_argument(
        "--slo", default="", help="objectives, e.g. ttft_p95_ms=500; the dashboard checks them"
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="seed of prompts, lengths and arrivals"
    )
    parser.add_argument("--max-output-tokens", type=int, default=default.max_output_tokens)
    parser.add_argument("--output", default=".", help="directory for samples that the server does not store")
    parser.add_argument(
        "--allow-remote-host",
        action="store_true",
        help="load a server that is not on this machine; it must be yours",
    )


@events.init.add_listener
def _on_init(environment: Environment, **_kwargs: Any) -> None:
    environment.loadtest_workers = Workers(environment.runner)
    options = environment.parsed_options
    if not _is_prepared(environment) and options is not None and options.mix:
        OpenLoopUser.mix = parse_mix(options.mix)
        for kind, weight in OpenLoopUser.mix.items():
            USERS[kind].weight = weight
    # One line per request would fill Locust's log.
    logging.getLogger("httpx").setLevel(logging.WARNING)


@events.test_start.add_listener
def _on_test_start(environment: Environment, **_kwargs: Any) -> None:
    if _is_prepared(environment):
        return
    try:
        prepare(environment, plan_of(environment), USER_KINDS)
    except (ConfigError, UnreachableError) as error:
        print(error, file=sys.stderr)
        environment.process_exit_code = 2
        environment.runner.quit()
        raise StopUser(str(error)) from None
    environment.loadtest_ended = Event()
    gevent.spawn(pass_samples_on, environment, environment.loadtest_ended)


@events.test_stop.add_listener
def _on_test_stop(environment: Environment, **_kwargs: Any) -> None:
    if not _is_prepared(environment) and hasattr(environment, "loadtest_ended"):
        environment.loadtest_ended.set()
        environment.loadtest.store.flush()
