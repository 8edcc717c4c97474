"""Thread-safe queue between callers and the engine's thread: new requests, cancellations and live request ids."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import TypeVar

from twofold.api.errors import CapacityError, RequestError
from twofold.engine.requests import RequestState
from twofold.step.sequences import Sequence

T = TypeVar("T")


class Inbox:
    """Thread-safe. Callers put, cancel and drain; the engine's thread takes requests and reports finished ones."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards all fields. Hold it to count requests here and in the scheduler consistently."""
        self._new: deque[RequestState] = deque()
        self._cancelled: set[str] = set()
        self._live: set[str] = set()
        self._tasks: deque[Callable[[Exception | None], None]] = deque()
        self._closed = False
        self.draining = False
        """Whether new requests are refused."""

    def __len__(self) -> int:
        return len(self._new)

    def new(self) -> list[Sequence]:
        """Sequences of requests that the engine's thread has not taken yet. Hold `changed`."""
        return [state.sequence for state in self._new]

    # ---- callers' threads -------------------------------------------------------------------------------------------

    def put(self, request_id: str, check_room: Callable[[], None], begin: Callable[[], RequestState]) -> None:
        """Accept a request. `check_room` raises CapacityError if the queue is full; `begin` makes the request's state.

        Raises:
            RequestError: the id is in use.
            CapacityError: no room, or draining.
        """
        with self.changed:
            if self.draining:
                raise CapacityError(
                    "the server is shutting down; send the request to another one", draining=True
                )
            check_room()
            if request_id in self._live:
                raise RequestError(
                    f"request id {request_id!r} is in use; ids must be unique", param="request_id"
                )
            self._new.append(begin())
            self._live.add(request_id)
            self.changed.notify()

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Unknown ids are ignored."""
        with self.changed:
            if request_id in self._live:
                self._cancelled.add(request_id)
                self.changed.notify()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the live ones. True if all finished in time."""
        with self.changed:
            self.draining = True
            self.changed.notify()
            return self.changed.wait_for(lambda: not self._live, timeout_s)

    def close(self) -> None:
        """Cancel live requests and end the engine's wait for work permanently."""
        with self.changed:
            self.draining = True
            self._cancelled |= self._live
            self._closed = True
            self.changed.notify()

    def run_between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread between two steps and return its result.

        Raises:
            CapacityError: the engine is closed. Also whatever `work` raises.
        """
        done: Future[T] = Future()

        def run_task(refused: Exception | None) -> None:
            try:
                if refused is not None:
                    raise refused
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        with self.changed:
            if self._closed:
                raise _closed()
            self._tasks.append(run_task)
            self.changed.notify()
        return done.result()

    def run_unserved(self, work: Callable[[], T]) -> T:
        """Run `work` on the caller's thread, one caller at a time, of an engine that has no thread of its own.

        Raises:
            CapacityError: the engine is closed. Also whatever `work` raises.
        """
        with self.changed:
            if self._closed:
                raise _closed()
            return work()

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def take(self, receive: Callable[[RequestState], None]) -> None:
        """Pass new requests to `receive`, oldest first. Concurrent counts see each request exactly once."""
        if not self._new:
            return
        with self.changed:
            while self._new:
                receive(self._new.popleft())

    def put_back(self, waiting: Seq[RequestState]) -> None:
        """Let these requests, which nothing was computed for, be taken again before newer ones."""
        with self.changed:
            self._new.extendleft(reversed(waiting))

    def run_tasks(self) -> None:
        """Run the pending tasks in order; after `close` they are refused."""
        while self._tasks:
            self._tasks.popleft()(_closed() if self._closed else None)

    def take_cancelled(self) -> set[str]:
        if not self._cancelled:
            return set()
        with self.changed:
            cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def finished(self, request_id: str) -> None:
        with self.changed:
            self._live.discard(request_id)
            self.changed.notify_all()

    def wait_for_work(self) -> bool:
        """Sleep until there is a new request, a cancellation, or close. False if closed."""
        with self.changed:
            self.changed.wait_for(lambda: self._new or self._cancelled or self._tasks or self._closed)
            return not self._closed


def _closed() -> CapacityError:
    return CapacityError("the engine has been closed", draining=True)
