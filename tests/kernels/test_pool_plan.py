"""Which threads a pool has and where: nodes and cores from a made-up system, with this process's own CPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold import _core
from twofold._testing import kernels
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.weights.host_memory import available_memory_bytes

from tests.kernels.memory_nodes import CPUS, listed, needs_two, system, two_nodes
from tests.tiny_models.writing import weight_matrix


def write_cgroups(root: Path, groups: str, files: dict[str, str]) -> None:
    """What the kernel shows of this process's cgroups, and the files of their folders."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@needs_two
def test_a_full_pool_has_a_core_for_every_thread_and_its_nodes(tmp_path: Path) -> None:
    pool = ops.ThreadPool(0, "auto", two_nodes(tmp_path))
    half = len(CPUS) // 2
    assert pool.num_threads == len(CPUS)
    assert pool.num_nodes == 2
    assert pool.placement == [(int(i >= half), [cpu]) for i, cpu in enumerate(CPUS)]
    assert "2 memory nodes, each bound to its core" in pool.reason


@needs_two
def test_chosen_nodes_only(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    half = len(CPUS) // 2
    pool = ops.ThreadPool(0, "3", root)
    assert pool.num_nodes == 1
    assert pool.placement == [(0, CPUS[half:])] * (len(CPUS) - half)
    assert ops.ThreadPool(0, "0,3", root).num_nodes == 2
    with pytest.raises(ConfigError, match=r"numa names node 1; the nodes .* are 0,3"):
        ops.ThreadPool(0, "0,1", root)


@needs_two
def test_a_smaller_pool_is_bound_to_nodes_where_there_are_several(tmp_path: Path) -> None:
    one = ops.ThreadPool(1, "auto", two_nodes(tmp_path / "two"))
    assert one.num_nodes == 1
    assert one.placement[0][1] in (CPUS[: len(CPUS) // 2], CPUS[len(CPUS) // 2 :])
    assert ops.ThreadPool(1, "auto", system(tmp_path / "one", {0: listed(CPUS)})).placement == [(0, [])]


def test_more_threads_than_cores_are_bound_to_no_core(tmp_path: Path) -> None:
    pool = ops.ThreadPool(len(CPUS) + 1, "auto", system(tmp_path, {0: listed(CPUS)}))
    assert pool.placement == [(0, [])] * (len(CPUS) + 1)


@needs_two
def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    pair = f"{CPUS[0]},{CPUS[1]}"
    root = system(tmp_path, {0: listed(CPUS)}, {CPUS[0]: pair, CPUS[1]: pair})
    assert ops.ThreadPool(0, "auto", root).num_threads == len(CPUS) - 1


@needs_two
@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "199999 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, len(CPUS)),
        (
            "0::/a/b",
            {"cpu.max": "max 100000", "a/cpu.max": "100000 100000", "a/b/cpu.max": "900000 100000"},
            1,
        ),
        # Without a cgroup namespace the container's own group is mounted as the top.
        ("0::/docker/1", {"cpu.max": "100000 100000"}, 1),
        ("1:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 1),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, len(CPUS)),
        ("1:cpu:/b", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, len(CPUS)),
    ],
)
def test_a_quota_rounded_down_limits_the_pool(
    tmp_path: Path, groups: str, files: dict[str, str], threads: int
) -> None:
    root = system(tmp_path, {0: listed(CPUS)})
    write_cgroups(tmp_path, groups, files)
    assert ops.ThreadPool(0, "auto", root).num_threads == threads


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/", {"memory.max": "max"}, 8000 * 1024),
        ("0::/", {"memory.max": "5000", "memory.current": "1000", "memory.stat": "inactive_file 300"}, 4300),
        ("0::/a", {"memory.max": "9000", "a/memory.max": "2000", "a/memory.current": "500"}, 1500),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "3000",
                "memory/a/memory.usage_in_bytes": "900",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 200",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            2300,
        ),
        ("0::/", {"memory.max": "100", "memory.current": "200"}, 0),
    ],
)
def test_available_memory_is_limited_by_every_cgroup(
    tmp_path: Path, groups: str, files: dict[str, str], available: int
) -> None:
    write_cgroups(tmp_path, groups, files)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000 kB\n")
    assert available_memory_bytes(str(tmp_path)) == available


def test_a_system_that_describes_nothing_is_one_node(tmp_path: Path) -> None:
    pool = ops.ThreadPool(0, "auto", system(tmp_path, {}))
    assert (pool.num_nodes, pool.num_threads) == (1, len(CPUS))


@pytest.mark.parametrize("numa", ["", "x", "1,", "-1", "0-", "3-1", "0;1", "99999999999"])
def test_what_is_no_list_of_nodes_is_refused(tmp_path: Path, numa: str) -> None:
    with pytest.raises(ConfigError, match="expected off, auto, or nodes such as 0"):
        ops.ThreadPool(1, numa, system(tmp_path, {0: listed(CPUS)}))


@needs_two
@pytest.mark.parametrize("chunks", [0, 1, 7, 1000])
def test_every_chunk_runs_once_on_two_nodes(tmp_path: Path, chunks: int) -> None:
    pool = ops.ThreadPool(0, "auto", two_nodes(tmp_path))
    assert np.array_equal(kernels.count_chunks(pool, chunks, repeats=200), np.full(chunks, 200))


@needs_two
def test_nodes_change_no_result(tmp_path: Path) -> None:
    """Packed by each node's own threads and computed by both: the same bits as on one node."""
    rng = np.random.default_rng(0)
    head = weight_matrix(rng.standard_normal((1000, 96)).astype(np.float32))
    up, down = (
        weight_matrix(rng.standard_normal(shape).astype(np.float32)) for shape in ((200, 96), (96, 200))
    )
    hidden = rng.standard_normal((9, 96)).astype(np.float32)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(9)]).astype(np.int32)
    shares = np.full((9, 2), 0.5, np.float32)
    results = []
    for pool in (ops.ThreadPool(1), ops.ThreadPool(0, "auto", two_nodes(tmp_path))):
        logits, mixed = np.empty((9, 1000), np.float32), hidden.copy()
        ops.LmHead(pool, np.ones(96, np.float32), ops.PackedMatrix(pool, [head]), 1e-6).forward(
            hidden, logits
        )
        store = _core.ExpertStore(4, 96, 200, [("f32",) * 3], huge_pages=pool.num_nodes == 1)
        store.put(pool, 0, 0, [(up, up, down)] * 4)
        executor = _core.MoeExecutor(pool, store)
        executor.begin_step(0, [0] * 9, list(range(9)))
        executor.forward(0, hidden, ids, shares, mixed)
        results.append((logits, mixed))
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)
