"""Messages between ranks over torch.distributed: jobs from rank 0, answers to it."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from twofold import _core
from twofold.api.errors import KernelError
from twofold.parallel.groups import MessageGroup

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

STOP: Final = 0
"""Kind of the job that ends a rank (`RankJob` in engine/runtime/host/ranks.h)."""

_HEADER_BYTES: Final = 8
_SHORT_BYTES: Final = 64 * 1024
"""Largest message that is sent in one piece: a longer one is announced first, so that its receiver makes room."""
_PING_S: Final = 2.0


class RankLink:
    """This rank's connections. Rank 0 sends jobs and receives answers; the others do the reverse."""

    def __init__(self, group: MessageGroup, names: Sequence[str], timeout_s: float) -> None:
        """
        Args:
            names: each rank's, for messages.
            timeout_s: seconds that a rank may be silent.
        """
        self.rank, self.size = group.rank, group.size
        self.names = names
        self.ranks = _core.Ranks(self.rank, self.size, send_job=self.send_job, receive=self.receive)
        """What native code calls."""
        self.lost = ""
        """How a rank was lost; empty: none was."""
        self.ending_of: Callable[[int], str | None] = lambda rank: None
        """How a rank's process ended, where that is known."""
        self._group, self._device = group.group, group.device
        self._timeout_s = timeout_s
        self._short_bytes = _SHORT_BYTES if group.device is None else _HEADER_BYTES
        self._room = torch.empty(self._short_bytes, dtype=torch.uint8)
        self._is_closed = threading.Event()
        self._pinging: threading.Thread | None = None

    # ---- rank 0 ------------------------------------------------------------------------------------------------------

    def send_job(self, to: int, job: memoryview, rows: memoryview) -> None:
        """Send a job and its rows, as bytes. Raises KernelError if the rank is lost."""
        header = np.array([job.nbytes, rows.nbytes], np.int32).tobytes()
        if _HEADER_BYTES + job.nbytes + rows.nbytes > self._short_bytes:
            self._send(to, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            header = b""
        message = bytearray().join((header, job, rows))
        self._send(to, torch.frombuffer(message, dtype=torch.uint8))

    def receive(self, rank: int, rows: memoryview) -> None:
        """Receive a rank's answer into `rows`, which has its size. Raises KernelError if the rank is lost."""
        self._receive(rank, torch.frombuffer(rows, dtype=torch.uint8))

    def start_pings(self, on_lost: Callable[[str], None]) -> None:
        """Ask the other ranks every two seconds for a sign of life; `on_lost` is called once, on a thread, with how a
        rank was lost."""

        def ping() -> None:
            while not self._is_closed.wait(_PING_S):
                try:
                    self.ranks.ping()
                except KernelError as error:
                    if not self._is_closed.is_set():
                        on_lost(self.lost or str(error))
                    return

        self._pinging = threading.Thread(target=ping, name="twofold-ranks", daemon=True)
        self._pinging.start()

    def close(self) -> None:
        """End the other ranks, from rank 0, if they wait for jobs. Safe to call twice."""
        if self._is_closed.is_set() or self._pinging is None:
            return
        self._is_closed.set()
        self._pinging.join(self._timeout_s)
        stop = memoryview(np.array([STOP], np.int32).tobytes())
        for to in range(1, self.size):
            with contextlib.suppress(KernelError):
                self.send_job(to, stop, memoryview(b""))

    # ---- the other ranks ---------------------------------------------------------------------------------------------

    def next_job(self) -> tuple[I32, F32]:
        """The next job and the rows sent with it. Raises KernelError if rank 0 is lost."""
        self._receive(0, self._room)
        message = self._room.numpy()
        num_job, num_rows = message[:_HEADER_BYTES].view(np.int32).tolist()
        if _HEADER_BYTES + num_job + num_rows > self._short_bytes:
            long = torch.empty(num_job + num_rows, dtype=torch.uint8)
            self._receive(0, long)
            body = long.numpy()
        else:
            body = message[_HEADER_BYTES : _HEADER_BYTES + num_job + num_rows].copy()
        return body[:num_job].view(np.int32), body[num_job:].view(np.float32)

    def answer(self, rows: F32) -> None:
        """Send rank 0 the answer to the last job. Raises KernelError if rank 0 is lost."""
        self._send(0, torch.from_numpy(rows).view(torch.uint8))

    # ---- both --------------------------------------------------------------------------------------------------------

    def _send(self, to: int, message: torch.Tensor) -> None:
        sent = message if self._device is None else message.to(self._device)
        self._wait(to, lambda: self._group.send([sent], to, 0))

    def _receive(self, rank: int, into: torch.Tensor) -> None:
        got = into if self._device is None else torch.empty_like(into, device=self._device)
        self._wait(rank, lambda: self._group.recv([got], rank, 0))
        if got is not into:
            into.copy_(got)

    def _wait(self, rank: int, begin: Callable[[], Any]) -> None:
        if self.lost:
            raise KernelError(self.lost)
        try:
            begin().wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            self.lost = self.report(rank, str(error))
            raise KernelError(self.lost) from None

    def report(self, rank: int, reason: str) -> str:
        """How a rank was lost, for users. reason: what torch said."""
        ending = self.ending_of(rank)
        if ending is None:
            is_late = "imed out" in reason or "imeout" in reason
            ending = f"it was silent for {self._timeout_s:g} s" if is_late else "its connection closed"
        return f"rank {rank} ({self.names[rank]}) was lost: {ending}; its requests end here, start all ranks again"
