"""A process's place among the ranks, and the cores that it computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from twofold.api.errors import ConfigError
from twofold.api.parallel_config import ParallelConfig

_NODES: Final = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Place:
    """One rank: its number, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int
    """Number among the ranks of this machine."""
    local_size: int
    address: str
    port: int
    """0: rank 0 takes any free port."""
    has_store: bool
    """Whether this process listens where the ranks meet; False for rank 0 of torchrun, whose agent listens."""
    attempt: int = 0
    """Number of times that torchrun, whose store outlives the ranks, has restarted them."""

    def on_this_machine(self, local_rank: int, port: int) -> Place:
        """The place of another rank of this machine."""
        rank = self.rank - self.local_rank + local_rank
        return replace(self, rank=rank, local_rank=local_rank, port=port, has_store=False)

    def alone(self) -> Place:
        """The same place for a process that starts no other ranks."""
        return replace(self, local_rank=0, local_size=1)

    def environment(self) -> dict[str, str]:
        """Variables that torchrun would give a process of this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not self.has_store),
        }


def find_place(config: ParallelConfig, environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place: of torchrun's environment if that is set, else of the settings.

    Raises:
        ConfigError: the environment is incomplete, or contradicts --tensor-parallel-size.
    """
    size = config.tensor_parallel_size
    if "RANK" not in environ:
        local_size = size // config.nnodes
        port = config.master_port if config.nnodes > 1 else 0
        return Place(
            config.node_rank * local_size,
            size,
            0,
            local_size,
            config.master_addr,
            port,
            has_store=config.node_rank == 0,
        )
    numbers = {
        name: _number(environ, name, default)
        for name, default in (
            ("RANK", None),
            ("WORLD_SIZE", None),
            ("MASTER_PORT", None),
            ("LOCAL_RANK", 0),
            ("LOCAL_WORLD_SIZE", 1),
            ("TORCHELASTIC_RESTART_COUNT", 0),
        )
    }
    if numbers["WORLD_SIZE"] != size:
        raise ConfigError(
            f"WORLD_SIZE is {numbers['WORLD_SIZE']} and --tensor-parallel-size {size}; start as many processes as ranks"
        )
    if numbers["RANK"] >= size:
        raise ConfigError(f"RANK is {numbers['RANK']}; it takes a number from 0 to {size - 1}")
    return Place(
        numbers["RANK"],
        size,
        numbers["LOCAL_RANK"],
        numbers["LOCAL_WORLD_SIZE"],
        environ.get("MASTER_ADDR", "127.0.0.1"),
        numbers["MASTER_PORT"],
        has_store=numbers["RANK"] == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=numbers["TORCHELASTIC_RESTART_COUNT"],
    )


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        given = f"is {text!r}" if text else "is not set"
        raise ConfigError(
            f"RANK is set and {name} {given}; it takes a whole number. torchrun sets both; unset RANK without it"
        )
    return int(text)


def cores_of(place: Place, allowed: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """The cores of a rank, so that ranks of one machine share none.

    As many ranks as memory nodes, or fewer, get whole nodes; more ranks share a node's cores out.

    Args:
        allowed: cores that this process may use.
        nodes: cores of each memory node.
    """
    usable = [[core for core in node if core in set(allowed)] for node in nodes]
    usable = [node for node in usable if node] or [sorted(allowed)]
    rank, size = place.local_rank, place.local_size
    if size <= len(usable):
        mine = usable[rank * len(usable) // size : (rank + 1) * len(usable) // size]
        return sorted(core for node in mine for core in node)
    node = rank * len(usable) // size
    sharing = [other for other in range(size) if other * len(usable) // size == node]
    cores, at = usable[node], sharing.index(rank)
    mine_of_node = cores[at * len(cores) // len(sharing) : (at + 1) * len(cores) // len(sharing)]
    return sorted(mine_of_node) or cores  # more ranks than cores share them


def bind_to_cores(place: Place) -> list[int]:
    """Bind this process to its rank's cores, before it starts threads; return them."""
    nodes = [
        _cores(path.read_text("ascii"))
        for path in sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    ]
    cores = cores_of(place, sorted(os.sched_getaffinity(0)), nodes)
    os.sched_setaffinity(0, cores)
    return cores


def _cores(text: str) -> list[int]:
    """ "0-2,8" → [0, 1, 2, 8]"""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
