"""Sends the load: at fixed concurrency (closed loop) or at arrival times (open loop), always with an end.

All times are by the event loop's clock.

`twofold loadtest` lets Locust's users ask, on green threads. `bench serve` and the capacity search keep this client,
because it measures less of itself: each piece is stamped when its socket is read (`stamped_stream`), while a green
thread stamps it when it runs again. A server that sends the first of 64 streams' tokens after 20 ms and a further one
every 20 ms was measured with a median TTFT of 46 ms by this client and of 70 ms by Locust's, and a 99th percentile of
gaps of 53 and 68 ms (medians of seven runs in turn, two cores with a load of 8; CPU time per token is equal). Locust is
an extra as well, and patches the standard library of the process that imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.tools.loadgen.arrivals import arrival_times, arrivals_within
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError
from twofold.tools.loadgen.metrics import Failure, Run, Sample
from twofold.tools.loadgen.slo import Slo
from twofold.tools.loadgen.workload import Conversation, PromptShape, Workload


@dataclass(frozen=True)
class LoadPlan:
    """Amount, timing and limits of a load."""

    num_prompts: int
    """Conversations; each has `PromptShape.num_turns` requests."""
    max_concurrency: int | None = None
    """Concurrent conversations; None: no limit (open loop only)."""
    request_rate: float | None = None
    """New conversations per second; None: closed loop, where each finished conversation starts the next at once."""
    burstiness: float = 1.0
    duration_s: float | None = None
    """No request starts later than this."""
    fixed_count: bool = False
    """Exactly `request_rate` × `duration_s` conversations, at the moments of a Poisson process of so many arrivals."""
    timeout_s: float = 600.0
    """Limit for one request."""
    num_warmups: int = 0
    """Conversations before the measurement, one after the other; not counted."""
    seed: int = 0
    slos: Sequence[Slo] = ()


@dataclass
class Load:
    """A load to be sent once."""

    client: HttpClient
    workload: Workload
    shape: PromptShape
    plan: LoadPlan
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with (finished requests, all requests)."""
    stage: str = ""
    """Name of the load in its samples."""
    _samples: list[Sample] = field(default_factory=list)
    _in_flight: int = 0
    _last_begin_s: float = float("inf")
    _counts: bool = False
    """True after the warm-up."""

    async def run(self) -> Run:
        """Send the load and wait for the last answer. Failed requests are samples, too."""
        self._loop = asyncio.get_running_loop()
        for number in range(self.plan.num_warmups):
            # Separate numbers: the warm-up puts no prompt of the measurement into a cache.
            await self._converse(-2 - number)
        self._counts = True
        begin_s = self._loop.time()
        if self.plan.duration_s is not None:
            self._last_begin_s = begin_s + self.plan.duration_s
        if self.plan.request_rate is None:
            await self._closed_loop()
        else:
            await self._open_loop(begin_s, self.plan.request_rate)
        return Run(self._samples, self._loop.time() - begin_s, self.plan.slos)

    async def _closed_loop(self) -> None:
        numbers = iter(range(self.plan.num_prompts))

        async def one_user() -> None:
            for number in numbers:
                if self._is_over:
                    return
                await self._converse(number)

        num_users = min(self.plan.max_concurrency or 1, self.plan.num_prompts)
        await asyncio.gather(*(one_user() for _ in range(num_users)))

    async def _open_loop(self, begin_s: float, request_rate: float) -> None:
        plan = self.plan
        places = None if plan.max_concurrency is None else asyncio.Semaphore(plan.max_concurrency)

        async def arrive(number: int, due_s: float) -> None:
            async with places or contextlib.nullcontext():
                if not self._is_over:
                    await self._converse(number, waited_s=self._loop.time() - due_s)

        arrivals: Iterable[float] = arrival_times(request_rate, plan.burstiness, plan.seed)
        if plan.fixed_count and plan.duration_s is not None:
            arrivals = arrivals_within(request_rate, plan.duration_s, plan.seed)
        async with asyncio.TaskGroup() as tasks:
            for number, at_s in enumerate(itertools.islice(arrivals, plan.num_prompts)):
                due_s = begin_s + at_s
                if due_s > self._last_begin_s:
                    break
                await asyncio.sleep(due_s - self._loop.time())
                tasks.create_task(arrive(number, due_s))

    @property
    def _is_over(self) -> bool:
        return self._loop.time() > self._last_begin_s

    async def _converse(self, number: int, waited_s: float = 0.0) -> None:
        conversation = self.workload.conversation(number, self.shape)
        last_answer = ""
        for turn in range(1, self.shape.num_turns + 1):
            if turn > 1 and self._is_over:
                return
            sample = await self._ask(conversation, turn, last_answer, waited_s=waited_s if turn == 1 else 0.0)
            if self._counts:
                self._samples.append(sample)
                self.progress(len(self._samples), self.plan.num_prompts * self.shape.num_turns)
            if not sample.ok:
                # The history lacks an answer, so later turns cannot be sent.
                return
            last_answer = sample.answer.text

    async def _ask(
        self, conversation: Conversation, turn: int, last_answer: str, *, waited_s: float
    ) -> Sample:
        body = json.dumps(conversation.body(turn, last_answer)).encode()
        answer = AnswerStream(self._loop.time())
        failure: Failure = (None, None)
        self._in_flight += 1
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                await self.client.lines(
                    self.workload.path,
                    body,
                    answer.keep,
                    lambda: answer.sent(self._loop.time()),
                )
            answer.end()
        except (HttpStatusError, MalformedStreamError, OSError) as error:
            failure = failure_of(answer.first_error(error), self.plan.timeout_s)
        sample = Sample.finished(
            answer,
            self._loop.time(),
            failure,
            number=conversation.number,
            turn=turn,
            waited_s=waited_s,
            stage=self.stage,
            num_users=self._in_flight,
        )
        self._in_flight -= 1
        return sample


def failure_of(error: Exception, timeout_s: float) -> tuple[str, str]:
    """(kind, message) of a request that failed."""
    if isinstance(error, HttpStatusError | MalformedStreamError):
        return error.kind, str(error)
    if isinstance(error, TimeoutError):
        return "timeout", f"not complete after {timeout_s:g} s"
    return type(error).__name__, str(error)
