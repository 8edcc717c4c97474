"""What the processes of one load test tell each other: its id, and how many users each of them has.

Locust can spread users over workers (`--processes`, `--worker`). The master names the test and passes on how many users
each worker has, so that every sample belongs to one test and knows all of its users.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from locust.runners import MasterRunner, Runner, WorkerRunner

_BEGIN: Final = "loadtest_begin"
_USERS: Final = "loadtest_users"
_USERS_PER_WORKER: Final = 100_000
"""Numbers of users are told apart by this."""


class Workers:
    """One per process; `runner` is None or a local one where there is no other process."""

    def __init__(self, runner: Runner | None = None) -> None:
        self._runner = runner
        self._entered = 0
        self._own = 0
        self._of_workers: dict[str, int] = {}
        self.loadtest_id = ""
        """Names the test; the same in all its processes."""
        if isinstance(runner, WorkerRunner):
            runner.register_message(_BEGIN, self._on_begin)
        if isinstance(runner, MasterRunner | WorkerRunner):
            runner.register_message(_USERS, self._on_users)

    @property
    def file_name(self) -> str:
        """For what this process alone writes."""
        index = f"-worker-{self._runner.worker_index}" if isinstance(self._runner, WorkerRunner) else ""
        return self.loadtest_id + index

    def begin(self) -> None:
        """A test begins. On a worker the master has named it: its message comes before the one to spawn users."""
        self._entered = self._own = 0
        self._of_workers.clear()
        if isinstance(self._runner, WorkerRunner) and self.loadtest_id:
            return
        self.loadtest_id = datetime.now().strftime("loadtest-%Y%m%d-%H%M%S")
        if isinstance(self._runner, MasterRunner):
            self._runner.send_message(_BEGIN, {"id": self.loadtest_id})

    def enter(self) -> int:
        """A user of this process begins; returns a number that no other user of the test has."""
        index = self._runner.worker_index if isinstance(self._runner, WorkerRunner) else 0
        number = max(0, index) * _USERS_PER_WORKER + self._entered
        self._entered += 1
        self._change(1)
        return number

    def leave(self) -> None:
        self._change(-1)

    def total(self) -> int:
        """Users that run now, in all processes."""
        own_id = self._runner.client_id if isinstance(self._runner, WorkerRunner) else None
        return self._own + sum(count for worker, count in self._of_workers.items() if worker != own_id)

    def _change(self, by: int) -> None:
        self._own += by
        if isinstance(self._runner, WorkerRunner):
            self._runner.send_message(_USERS, {"users": self._own})

    def _on_begin(self, msg: Any, **_kwargs: Any) -> None:
        self.loadtest_id = str(msg.data["id"])

    def _on_users(self, msg: Any, **_kwargs: Any) -> None:
        if isinstance(self._runner, MasterRunner):
            self._of_workers[msg.node_id] = int(msg.data["users"])
            self._runner.send_message(_USERS, self._of_workers)
        else:
            self._of_workers = dict(msg.data)
