"""How ranks find one another: a store at rank 0, identities compared, then a group of torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from twofold.api.errors import ConfigError, KernelError, ModelLoadError
from twofold.api.parallel_config import ParallelConfig
from twofold.parallel.groups import BACKENDS
from twofold.parallel.identity import Identity
from twofold.parallel.link import RankLink
from twofold.parallel.place import Place

_BEAT_S: Final = 1.0
_POLL_S: Final = 0.02
_READ_S: Final = 5.0
"""Longest time that rank 0, whose end closes the store, waits for the others to read why they do not meet."""
_REFUSED: Final = "refused"
"""Key of the reason why the ranks do not meet, set by the rank that found it."""


class Meeting:
    """The store where ranks meet, and the address that this rank listens on."""

    def __init__(
        self, place: Place, timeout_s: float, backend: str = ParallelConfig.distributed_backend
    ) -> None:
        """Open the store. Raises ConfigError if it cannot be reached, its port is taken, or the backend is missing."""
        self._backend = BACKENDS[backend]
        self._backend.check()
        self.place = place
        self.timeout_s = timeout_s
        self.port = place.port
        self.ending_of: Callable[[int], str | None] = lambda rank: None
        """How a rank's process ended, where that is known."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.address = _own_address(place)
        store = self._listening_store() if place.has_store else self._joined_store()
        self._store = PrefixStore(f"attempt {place.attempt}", store)

    def _listening_store(self) -> Store:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.place.address, self.place.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"--master-addr {self.place.address} and --master-port {self.place.port} cannot be listened on: "
                f"{error.strerror}; give an address of this machine and a free port"
            ) from None
        self.port = listener.getsockname()[1]
        return TCPStore(
            self.place.address,
            self.port,
            self.place.size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _joined_store(self) -> Store:
        try:
            return TCPStore(
                self.place.address,
                self.place.port,
                self.place.size,
                is_master=False,
                timeout=self._timeout,
                wait_for_workers=False,
            )
        except RuntimeError:
            raise ConfigError(
                f"rank {self.place.rank} cannot reach rank 0 at {self.place.address}:{self.place.port} within "
                f"{self.timeout_s:g} s; start rank 0, and check --master-addr and --master-port"
            ) from None

    def join(self, identity: Identity) -> RankLink:
        """Meet all ranks.

        Raises:
            ConfigError: a rank joined twice, did not come, or differs; all ranks raise it.
        """
        rank, size = self.place.rank, self.place.size
        name = f"{platform.node()}, process {os.getpid()}"
        with self._naming_store():
            self._check_size(name)
            if self._store.add(f"joined/{rank}", 1) > 1:
                raise ConfigError(
                    f"rank {rank} has joined already; give each machine its own --node-rank and the same --nnodes, or "
                    "end the earlier process"
                )
            self._store.set(f"name/{rank}", name)
            self._store.set(f"identity/{rank}", identity.as_json())
            for other in range(size):
                self._wait_for(f"identity/{other}", other)
            names = [self._store.get(f"name/{other}").decode() for other in range(size)]
            self._compare(names)
            self._store.set(f"ready to connect/{rank}", "")
            for other in range(size):
                self._wait_for(f"ready to connect/{other}", other)  # one that came may have ended meanwhile
            store = PrefixStore("group", self._store)
            group = self._backend.open(self.place, store, self.address, self._timeout)
        return RankLink(group, names, self.timeout_s)

    def _check_size(self, name: str) -> None:
        """Refuse the ranks if this one expects another number of them than the first one that came."""
        size = str(self.place.size)
        expected = self._store.compare_set("size", "", size).decode()
        if expected != size:
            self._refuse(
                f"rank {self.place.rank} ({name}) has --tensor-parallel-size {size}, the ranks before it {expected}; "
                "start all ranks with the same one",
                max(self.place.size, int(expected)),
            )

    def _compare(self, names: list[str]) -> None:
        texts = [self._store.get(f"identity/{other}").decode() for other in range(len(names))]
        problem = ""
        try:
            first = Identity.from_json(texts[0])
            for other, text in enumerate(texts):
                difference = Identity.from_json(text).difference(first)
                if difference and not problem:
                    problem = f"rank {other} ({names[other]}) has {difference}"
        except (TypeError, ValueError):
            problem = "the ranks run different versions"
        if not problem:
            return
        self._leave(len(names))
        raise ConfigError(f"{problem}; start all ranks with the same version, model and flags")

    def _refuse(self, problem: str, size: int) -> NoReturn:
        """Tell all ranks, of which there are `size` at most, why they do not meet, and raise it as ConfigError."""
        self._store.set(_REFUSED, problem)
        self._leave(size)
        raise ConfigError(problem)

    def _leave(self, size: int) -> None:
        """Say that this rank knows why the ranks do not meet; rank 0 waits until all that came do."""
        self._store.set(f"left/{self.place.rank}", "")
        if self.place.rank > 0:
            return
        arrived = [
            other
            for other in range(1, size)
            if self._store.check([f"joined/{other}"]) and self.ending_of(other) is None
        ]
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"left/{other}" for other in arrived], datetime.timedelta(seconds=_READ_S))

    def _wait_for(self, key: str, rank: int) -> None:
        deadline, size = time.monotonic() + self.timeout_s, self.place.size
        while not self._store.check([key]):
            if self._store.check([_REFUSED]):
                problem = self._store.get(_REFUSED).decode()
                self._leave(size)
                raise ConfigError(problem)
            if (ending := self.ending_of(rank)) is not None:
                self._refuse(
                    f"rank {rank} ended before the ranks met: {ending}; its own message says why", size
                )
            if time.monotonic() > deadline:
                self._refuse(
                    f"rank {rank} did not come to {self.place.address}:{self.port} within {self.timeout_s:g} s; "
                    "start it, or raise --distributed-timeout-s",
                    size,
                )
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _naming_store(self) -> Iterator[None]:
        """Lost connections become an error that names the store."""
        try:
            yield
        except (DistError, RuntimeError) as error:
            reason = str(error).split("\n", 1)[0][:200]
            raise ConfigError(
                f"rank {self.place.rank} lost another rank while the ranks met at {self.place.address}:{self.port} "
                f"({reason}); start all ranks again"
            ) from None

    # ---- loading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Show the other ranks signs of life meanwhile, and tell them if it fails."""
        done = threading.Event()
        rank = self.place.rank

        def beat() -> None:
            with contextlib.suppress(RuntimeError):
                while not done.wait(_BEAT_S):
                    self._store.add(f"alive/{rank}", 1)

        thread = threading.Thread(target=beat, name="twofold-loading", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"failed/{rank}", json.dumps(str(error) or type(error).__name__))
            raise
        finally:
            done.set()
            thread.join()

    def wait_until_loaded(self, link: RankLink, num_bytes: int) -> list[int]:
        """Wait until all ranks have loaded their shares; returns the bytes of each. num_bytes: this rank's.

        Raises:
            ModelLoadError: another rank failed, with its reason. KernelError: another rank was lost.
        """
        beats: dict[int, tuple[int, float]] = {}
        try:
            self._store.set(f"ready/{self.place.rank}", str(num_bytes))
            waiting = [rank for rank in range(self.place.size) if rank != self.place.rank]
            while waiting:
                waiting = [rank for rank in waiting if not self._store.check([f"ready/{rank}"])]
                for rank in waiting:
                    if self._store.check([f"failed/{rank}"]):
                        reason = json.loads(self._store.get(f"failed/{rank}"))
                        raise ModelLoadError(
                            f"rank {rank} ({link.names[rank]}) cannot load its share: {reason}"
                        )
                    self._check_beat(link, rank, beats)
                time.sleep(_POLL_S)
            return [int(self._store.get(f"ready/{rank}")) for rank in range(self.place.size)]
        except RuntimeError:
            raise KernelError(link.report(0, "the store closed")) from None

    def _check_beat(self, link: RankLink, rank: int, beats: dict[int, tuple[int, float]]) -> None:
        count, now = self._store.add(f"alive/{rank}", 0), time.monotonic()
        if link.ending_of(rank) is not None:
            raise KernelError(link.report(rank, ""))
        if rank not in beats or beats[rank][0] != count:
            beats[rank] = (count, now)
        elif now - beats[rank][1] > self.timeout_s:
            raise KernelError(link.report(rank, "timed out"))


def _own_address(place: Place) -> str:
    """The address of this machine in the network of rank 0. Raises ConfigError for a name that is not known."""
    try:
        family, _, _, _, where = socket.getaddrinfo(place.address, place.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--master-addr {place.address} cannot be used: {error.strerror or error}; give the address of machine 0"
        ) from None
