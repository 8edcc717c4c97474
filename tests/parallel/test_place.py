"""Places from settings and from torchrun's environment, and the cores of ranks that share a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.api.parallel_config import ParallelConfig
from twofold.parallel import place
from twofold.parallel.place import Place, bind_to_cores, cores_of, find_place

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_one_machine_uses_a_free_port_of_loopback() -> None:
    place = find_place(ParallelConfig(4), {})
    assert place == Place(0, 4, 0, 4, "127.0.0.1", 0, has_store=True)
    assert place.on_this_machine(3, 5000) == Place(3, 4, 3, 4, "127.0.0.1", 5000, has_store=False)


def test_machines_have_the_same_number_of_ranks_each() -> None:
    config = ParallelConfig(6, nnodes=3, node_rank=2, master_addr="10.0.0.5", master_port=4000)
    place = find_place(config, {})
    assert place == Place(4, 6, 0, 2, "10.0.0.5", 4000, has_store=False)
    assert place.on_this_machine(1, 4000).rank == 5


def test_torchrun_sets_the_rank() -> None:
    assert find_place(ParallelConfig(2), TORCHRUN) == Place(1, 2, 1, 2, "10.0.0.5", 29400, has_store=False)
    first = find_place(ParallelConfig(2), TORCHRUN | {"RANK": "0"})
    assert not first.has_store  # torchrun's agent listens
    assert find_place(ParallelConfig(2), first.environment()) == first


def test_a_child_finds_the_place_that_its_parent_gave_it() -> None:
    child = find_place(ParallelConfig(4), {}).on_this_machine(2, 5000)
    assert find_place(ParallelConfig(4), child.environment()) == child


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE is 3 and --tensor-parallel-size 2"),
        ({"RANK": "2"}, "RANK is 2; it takes a number from 0 to 1"),
        ({"RANK": "one"}, "RANK is set and RANK is 'one'"),
        ({"MASTER_PORT": ""}, "RANK is set and MASTER_PORT is not set"),
    ],
)
def test_a_contradicting_environment_is_refused(environment: dict[str, str], printed: str) -> None:
    with pytest.raises(ConfigError, match=printed):
        find_place(ParallelConfig(2), TORCHRUN | environment)


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        (
            {"tensor_parallel_size": 3, "nnodes": 2, "master_addr": "10.0.0.5"},
            "cannot be divided by --nnodes 2",
        ),
        ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2, "master_addr": "10.0.0.5"}, "count from 0"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "which other machines cannot reach"),
        ({"num_redundant_experts": 1, "enable_expert_parallel": False}, "give one of them"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], printed: str) -> None:
    with pytest.raises(ConfigError, match=printed):
        ParallelConfig(**settings)  # type: ignore[arg-type]


def cores_of_all(size: int, nodes: list[list[int]], allowed: list[int] | None = None) -> list[list[int]]:
    cores = allowed if allowed is not None else sorted(core for node in nodes for core in node)
    return [
        cores_of(Place(rank, size, rank, size, "127.0.0.1", 0, has_store=False), cores, nodes)
        for rank in range(size)
    ]


def test_ranks_get_whole_memory_nodes_or_share_one() -> None:
    two_sockets = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cores_of_all(2, two_sockets) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cores_of_all(1, two_sockets) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert cores_of_all(4, two_sockets) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cores_of_all(3, two_sockets) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert cores_of_all(2, [[0, 1, 2, 3, 4]]) == [[0, 1], [2, 3, 4]]
    assert cores_of_all(2, two_sockets, allowed=[4, 5]) == [[4], [5]]
    assert cores_of_all(3, [[0, 1]]) == [[0, 1], [0], [1]]


def test_a_rank_is_bound_to_the_cores_of_its_memory_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for node, cores in {"node0": "0-2,6\n", "node1": "\n", "node2": "3-5,7\n"}.items():  # node1 has no cores
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    bound: list[list[int]] = []
    monkeypatch.setattr(place, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 3, 4, 5, 6, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(list(cores)))
    first = find_place(ParallelConfig(2), {})
    assert [bind_to_cores(first), bind_to_cores(first.on_this_machine(1, 5000))] == bound
    assert bound == [[0, 1, 6], [3, 4, 5, 7]]
