"""A load test in several processes: workers run the users, the master writes the one result.

The master sends each worker the plan. Workers send their samples every second and after the last user has stopped.
Locust's own messages carry everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner, Runner, WorkerRunner
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan
from twofold.tools.loadgen.metrics import Sample
from twofold.tools.loadgen.sample_messages import as_message, from_message
from twofold.tools.loadgen.sample_store import SampleStore

from loadtest.state import UnreachableError, prepare
from loadtest.workers import Workers

_SAMPLES: Final = "loadtest_samples"
_FAILED: Final = "loadtest_failed"
_FLUSH_S: Final = 1.0
_LAST_SAMPLES_S: Final = 10.0
"""How long the master waits for the samples of workers that have stopped."""


class SpreadError(Exception):
    """The workers did not come, or could not begin."""


class Master:
    """The runner with workers; collects their samples."""

    def __init__(self, runner: MasterRunner, on_samples: Callable[[list[Sample]], None]) -> None:
        self._runner = runner
        self._on_samples = on_samples
        self._ended: set[str] = set()
        self.problem = ""
        """Why a worker could not begin."""
        runner.register_message(_SAMPLES, self._take)
        runner.register_message(_FAILED, self._note)

    def wait_for(self, num_workers: int, limit_s: float) -> None:
        """SpreadError if fewer workers connect in time."""
        if not _wait(lambda: len(self._runner.clients.ready) >= num_workers, limit_s):
            found = len(self._runner.clients.ready)
            raise SpreadError(
                f"{found} of {num_workers} workers came within {limit_s:g} s; start each with "
                "`twofold loadtest --worker --master-host HOST`"
            )

    def stop(self) -> int:
        """Stop the users, take the last samples, and let the workers go; the number of workers that were lost."""
        runner = self._runner
        workers = set(runner.clients)
        runner.stop(send_stop_to_client=False)
        # Locust's "stop" keeps a worker for another minute; "quit" too lets its users finish.
        for worker in workers:
            runner.server.send_to_client(Message("quit", None, worker))

        def are_over() -> bool:
            missing = {each.id for each in runner.clients.missing}
            return workers <= self._ended | missing

        _wait(are_over, runner.environment.stop_timeout + _LAST_SAMPLES_S)
        runner.greenlet.kill(block=True)
        return len(workers - self._ended)

    def _take(self, msg: Any, **_kwargs: Any) -> None:
        self._on_samples([from_message(each) for each in msg.data["samples"]])
        if msg.data["is_last"]:
            self._ended.add(msg.node_id)

    def _note(self, msg: Any, **_kwargs: Any) -> None:
        self.problem = str(msg.data["problem"])


class SentStore(SampleStore):
    """Sends a worker's samples to the master instead of to the server."""

    def __init__(self, runner: WorkerRunner) -> None:
        super().__init__("", "", None)
        self._runner = runner

    def flush(self, *, is_last: bool = False) -> None:
        offset_s = time.time() - time.perf_counter()
        batch, self._unsent = self._unsent, []
        messages = [as_message(sample, offset_s) for sample in batch]
        if messages or is_last:
            self._runner.send_message(_SAMPLES, {"samples": messages, "is_last": is_last})


@contextlib.contextmanager
def runner_of(environment: Environment, plan: LoadTestPlan) -> Iterator[Runner]:
    """A runner in this process, or a master's whose workers have come. SpreadError if they have not."""
    spread = plan.spread
    if spread.role == "local":
        yield environment.create_local_runner()
        return
    port = spread.port or _free_port()
    runner = environment.create_master_runner(spread.host, port)
    environment.loadtest_master = Master(runner, lambda samples: _add(environment, samples))
    own = dataclasses.replace(
        plan, spread=dataclasses.replace(spread, role="worker", host="127.0.0.1", port=port)
    )
    run_py = str(Path(__file__).with_name("run.py"))
    command = [sys.executable, run_py, own.to_json()]
    processes = [subprocess.Popen(command) for _ in range(spread.processes)]  # noqa: S603 (our own program)
    try:
        environment.loadtest_master.wait_for(spread.workers, spread.wait_s)
        yield runner
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


def work(plan: LoadTestPlan, environment: Environment, choose: Callable[[LoadTestPlan], object]) -> int:
    """Run users for the master until it quits. `choose` prepares the users of the master's plan."""
    spread = plan.spread
    try:
        runner = environment.create_worker_runner(spread.host, spread.port)
    except OSError as error:
        raise SpreadError(f"no master answers at {spread.host}:{spread.port} ({error})") from None
    ended = Event()
    stores: list[SentStore] = []

    def begin(message: Mapping[str, Any]) -> None:
        wanted = LoadTestPlan.from_json(str(message["plan"]))
        # Each machine's operator decides which servers it may load.
        own = dataclasses.replace(wanted, allow_remote_host=plan.allow_remote_host)
        choose(own)
        try:
            test = prepare(environment, own, own.mix)
            test.store = SentStore(runner)
            stores.append(test.store)
        except (ConfigError, UnreachableError) as error:
            runner.send_message(_FAILED, {"problem": f"worker on {socket.gethostname()}: {error}"})

    def flush_while_running() -> None:
        while not ended.wait(_FLUSH_S):
            for store in stores:
                store.flush()

    def end(**_kwargs: Any) -> None:
        for store in stores:
            store.flush(is_last=True)

    environment.loadtest_workers = Workers(runner, begin)
    environment.events.test_stop.add_listener(end)
    flusher = gevent.spawn(flush_while_running)
    parent = os.getppid()
    while not runner.greenlet.join(timeout=1.0):
        if spread.processes and os.getppid() != parent:
            break  # the master of this machine is gone
    ended.set()
    flusher.join()
    return 0


def _add(environment: Environment, samples: list[Sample]) -> None:
    for sample in samples:
        environment.loadtest.store.add(sample)


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        gevent.sleep(0.05)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
