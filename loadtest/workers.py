"""State shared by the processes of one load test: its id, and the number of users of each process.

Locust can spread users over workers (`--processes`, `--worker`). The master names the test and distributes the user
counts of all workers, so that every sample has the test's id and its total number of users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from locust.runners import MasterRunner, Runner, WorkerRunner

_BEGIN: Final = "loadtest_begin"
_USERS: Final = "loadtest_users"
_USERS_PER_WORKER: Final = 100_000
"""User numbers of different workers are this far apart."""


class Workers:
    """One per process; `runner` is None or a local one in a single-process test."""

    def __init__(
        self, runner: Runner | None = None, on_begin: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """on_begin: called on a worker with the master's message, which names the test and holds its plan."""
        self._runner = runner
        self._begins = on_begin
        self.share = (0, 1)
        """(number, count): this process starts every count-th arrival of an open loop, from that number on."""
        self._entered = 0
        self._own = 0
        self._of_workers: dict[str, int] = {}
        self.loadtest_id = ""
        """Name of the test, the same in all its processes."""
        if isinstance(runner, WorkerRunner):
            runner.register_message(_BEGIN, self._on_begin)
        if isinstance(runner, MasterRunner | WorkerRunner):
            runner.register_message(_USERS, self._on_users)

    @property
    def file_name(self) -> str:
        """Base name of files that this process alone writes."""
        index = f"-worker-{self._runner.worker_index}" if isinstance(self._runner, WorkerRunner) else ""
        return self.loadtest_id + index

    def begin(self, plan: str = "") -> None:
        """Start a test. `plan`: its plan as JSON, for workers without one.

        On a worker the master has already named it: that message precedes the one to spawn users.
        """
        self._entered = self._own = 0
        self._of_workers.clear()
        if isinstance(self._runner, WorkerRunner) and self.loadtest_id:
            return
        self.loadtest_id = datetime.now().strftime("loadtest-%Y%m%d-%H%M%S")
        if isinstance(self._runner, MasterRunner):
            count = self._runner.worker_count
            self._runner.send_message(_BEGIN, {"id": self.loadtest_id, "plan": plan, "workers": count})

    def enter(self) -> int:
        """Register a user of this process; returns a number that is unique in the test."""
        index = self._runner.worker_index if isinstance(self._runner, WorkerRunner) else 0
        number = max(0, index) * _USERS_PER_WORKER + self._entered
        self._entered += 1
        self._change(1)
        return number

    def leave(self) -> None:
        self._change(-1)

    def total(self) -> int:
        """Current number of users in all processes."""
        own_id = self._runner.client_id if isinstance(self._runner, WorkerRunner) else None
        return self._own + sum(count for worker, count in self._of_workers.items() if worker != own_id)

    def _change(self, by: int) -> None:
        self._own += by
        if isinstance(self._runner, WorkerRunner):
            self._runner.send_message(_USERS, {"users": self._own})

    def _on_begin(self, msg: Any, **_kwargs: Any) -> None:
        self.loadtest_id = str(msg.data["id"])
        count = max(1, int(msg.data["workers"]))
        self.share = self._runner.worker_index % count, count
        if self._begins is not None:
            self._begins(msg.data)

    def _on_users(self, msg: Any, **_kwargs: Any) -> None:
        if isinstance(self._runner, MasterRunner):
            self._of_workers[msg.node_id] = int(msg.data["users"])
            self._runner.send_message(_USERS, self._of_workers)
        else:
            self._of_workers = dict(msg.data)
