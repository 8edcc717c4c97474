"""Groups of torch.distributed that carry messages between ranks: gloo for host memory, NCCL for that of a GPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from twofold.api.errors import ConfigError
from twofold.parallel.place import Place


@dataclass(frozen=True)
class MessageGroup:
    """A group of all ranks, and how messages pass through it."""

    group: Any
    """ProcessGroup of torch.distributed, whose types lack send and recv."""
    device: torch.device | None
    """Memory that it sends from and receives in, messages of exactly the expected size; None: host memory, which may be
    larger than a received message."""

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())


@dataclass(frozen=True)
class GroupBackend:
    """A choice of --distributed-backend."""

    check: Callable[[], None]
    """Raises ConfigError if this machine cannot use the backend."""
    open: Callable[[Place, Store, str, datetime.timedelta], MessageGroup]
    """Connect the ranks: place, store, this machine's address and the longest wait. Raises RuntimeError."""


def open_gloo(place: Place, store: Store, address: str, timeout: datetime.timedelta) -> MessageGroup:
    """Connect over TCP, on the network of `address` alone."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return MessageGroup(gloo(store, place.rank, place.size, options), None)


def open_default_group(
    backend: str, place: Place, device: torch.device, store: Store, timeout: datetime.timedelta
) -> MessageGroup:
    """Connect by a backend whose messages are on a device."""
    distributed.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=None if device.index is None else device,
    )
    return MessageGroup(distributed.group.WORLD, device)


def close_default_group() -> None:
    """End the group that `open_default_group` made, if any, after its last message."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _check_nccl() -> None:
    missing = "no CUDA device was found"
    if not distributed.is_nccl_available():
        missing = f"torch {torch.__version__} has no NCCL"
    elif torch.cuda.is_available():
        return
    raise ConfigError(f"--distributed-backend nccl: {missing}; use gloo")


def _open_nccl(place: Place, store: Store, address: str, timeout: datetime.timedelta) -> MessageGroup:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost rank raises, as with gloo
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return open_default_group("nccl", place, device, store, timeout)


BACKENDS: Final[Mapping[str, GroupBackend]] = {
    "gloo": GroupBackend(lambda: None, open_gloo),
    "nccl": GroupBackend(_check_nccl, _open_nccl),
}
