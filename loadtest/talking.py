"""Conversations of one user: sends its turns, measures the answers, and reports them to Locust and to the store."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import gevent
from gevent.pool import Group
from locust.env import Environment
from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.tools.loadgen.generator import failure_of
from twofold.tools.loadgen.http_client import HttpStatusError
from twofold.tools.loadgen.metrics import Failure, Sample
from twofold.tools.loadgen.user_kinds import USER_KINDS, Asker, Turn
from twofold.tools.loadgen.workload import CHAT

from loadtest.prompts import FOLLOW_UPS, OPENINGS
from loadtest.state import LoadTest

TIMEOUT_S: Final = 600.0
_NAP_S: Final = 0.2


class Talker:
    """A user of a kind, with a number that is unique in the test."""

    def __init__(self, environment: Environment, kind: str, number: int, is_over: Callable[[], bool]) -> None:
        self._environment = environment
        self._test: LoadTest = environment.loadtest
        self._kind, self._number, self._is_over = kind, number, is_over
        self._asker = Asker(
            # The same conversations in every run of the same seed.
            random.Random(f"{self._test.plan.seed}/{kind}/{number}"),  # noqa: S311
            self._test.model,
            OPENINGS + FOLLOW_UPS,
            self._test.max_context,
            self._test.plan.max_output_tokens,
            calls_tools=self._test.calls_tools,
        )

    def converse(self) -> None:
        """One conversation, or its beginning if the test ends meanwhile."""
        conversation = USER_KINDS[self._kind](self._asker)
        answer: AnswerStream | None = None
        for number in range(1, 1000):
            try:
                turn = next(conversation) if number == 1 else conversation.send(answer)
            except StopIteration:
                return
            if not self._think(turn.think_s):
                return
            answer = self._ask(turn, number) if turn.at_once == 1 else self._ask_at_once(turn, number)

    def _think(self, seconds: float) -> bool:
        """Wait; False if the user stopped meanwhile."""
        end_s = time.monotonic() + seconds
        while not self._is_over() and (left_s := end_s - time.monotonic()) > 0:
            gevent.sleep(min(left_s, _NAP_S))
        return not self._is_over()

    def _ask_at_once(self, turn: Turn, number: int) -> None:
        group = Group()
        for copy in range(turn.at_once):
            body = turn.body | {"seed": (turn.body["seed"] + copy) % 2**31}
            group.spawn(self._ask, replace(turn, body=body), number)
        group.join()

    def _ask(self, turn: Turn, number: int) -> AnswerStream | None:
        """Send one turn; the answer, or None if it failed or was given up."""
        test = self._test
        stage = test.stage()
        body = json.dumps(turn.body).encode()
        answer = AnswerStream(time.perf_counter())
        failure: Failure = (None, None)
        gave_up = False
        limit_s = TIMEOUT_S if turn.patience_s is None else turn.patience_s
        # Not a TimeoutError: httpx would turn that into an error of the connection.
        limit = gevent.Timeout(limit_s)
        try:
            with limit:
                test.client.lines(
                    CHAT,
                    body,
                    answer.keep,
                    lambda: answer.sent(time.perf_counter()),
                )
            answer.end()
        except gevent.Timeout as over:
            if over is not limit:
                raise
            gave_up = turn.patience_s is not None
            reason = answer.first_error(TimeoutError())
            failure = (None, None) if gave_up else failure_of(reason, limit_s)
        except (HttpStatusError, MalformedStreamError, OSError) as error:
            failure = failure_of(answer.first_error(error), limit_s)
        sample = Sample.finished(
            answer,
            time.perf_counter(),
            failure,
            number=self._number,
            turn=number,
            gave_up=gave_up,
            name=self._kind,
            stage=stage,
            num_users=test.workers.total(),
        )
        test.store.add(sample)
        self._report_to_locust(sample)
        return answer if sample.complete else None

    def _report_to_locust(self, sample: Sample) -> None:
        """One request event, and the latencies as entries of their own that Locust's total does not count."""
        self._environment.events.request.fire(
            request_type="POST",
            name=self._kind,
            response_time=sample.took_ms,
            response_length=len(sample.answer.text),
            exception=None if sample.ok else RuntimeError(f"{sample.error_kind}: {sample.error}"),
            context={},
        )
        if not sample.ok:
            return
        for metric in ("ttft", "tpot", "itl"):
            # `events.request` would add each of these to the number of requests.
            entry = self._environment.stats.get(self._kind, metric.upper())
            for value in sample.values(metric):
                entry.log(value, 0)
