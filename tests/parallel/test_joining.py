"""Ranks that meet over a store and gloo: same answers, and one line for each way in which they cannot meet."""

from __future__ import annotations

import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.models import open_model_files
from twofold.parallel import groups
from twofold.parallel.identity import model_digest
from twofold.parallel.joining import Meeting
from twofold.parallel.link import STOP, RankLink
from twofold.parallel.place import Place
from twofold.parallel.session import rank_config

from tests.e2e.ports import free_port
from tests.parallel.meeting import IDENTITY, meet
from tests.tiny_models.writing import TinyModel, write_tiny_model


def test_connected_ranks_exchange_messages_of_any_size() -> None:
    leader, worker = meet(0, 1)
    assert isinstance(leader, RankLink)
    assert isinstance(worker, RankLink)
    assert leader.names == worker.names
    jobs: list[list[int]] = []

    def serve() -> None:
        while (got := worker.next_job())[0][0] != STOP:
            jobs.append(got[0].tolist())
            worker.answer(got[1] * 2)

    thread = threading.Thread(target=serve)
    thread.start()
    leader.start_pings(lambda reason: None)
    for count in (1, 16_000, 100_000):  # the last one takes two messages
        rows, answer = np.arange(count, dtype=np.float32), np.zeros(count, np.float32)
        leader.send_job(1, memoryview(np.array([2, count], np.int32)).cast("B"), memoryview(rows).cast("B"))
        leader.receive(1, memoryview(answer).cast("B"))
        np.testing.assert_array_equal(answer, rows * 2)
    leader.close()
    thread.join()
    assert jobs == [[2, 1], [2, 16_000], [2, 100_000]]


@pytest.mark.parametrize(
    ("field", "printed"),
    [
        ("version", "has version 9, rank 0 has 1"),
        ("level", "has CPU level 9, rank 0 has avx2"),
        ("model", r"has model 9, rank 0 has m \(1\)"),
        ("settings", "has settings 9, rank 0 has --x 1"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_sides(field: str, printed: str) -> None:
    other = replace(IDENTITY, **{field: "9"})
    for error in meet(0, 1, 2, size=3, identities={2: other}):
        assert isinstance(error, ConfigError)
        assert re.fullmatch(
            rf"rank 2 \(.*, process \d+\) {printed}; start all ranks with the same version, model and flags",
            str(error),
        )


def test_a_missing_rank_is_named_by_all_others() -> None:
    for error in meet(0, 1, size=3, timeout_s=1):
        assert isinstance(error, ConfigError)
        assert str(error).startswith("rank 2 did not come to 127.0.0.1:")


def test_a_rank_that_joined_and_ended_is_named_by_the_others() -> None:
    store = Meeting(Place(0, 2, 0, 1, "127.0.0.1", 0, has_store=True), 5)
    ended = PrefixStore("attempt 0", TCPStore("127.0.0.1", store.port, is_master=False))
    ended.set("name/1", "there, process 5")
    ended.set("identity/1", IDENTITY.as_json())
    (error,) = meet(0, port=store.port, timeout_s=1)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("rank 1 did not come to 127.0.0.1:")


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_expect_different_numbers_are_refused_on_all_sides(first: int) -> None:
    for error in meet(0, 1, sizes={first: 2, 1 - first: 4}):
        assert isinstance(error, ConfigError)
        assert re.fullmatch(
            r"rank \d \(.*, process \d+\) has --tensor-parallel-size (2, the ranks before it 4|4, the ranks before it "
            r"2); start all ranks with the same one",
            str(error),
        )


def test_ranks_that_torchrun_restarts_reconnect_in_its_store() -> None:
    store = Meeting(Place(0, 2, 0, 1, "127.0.0.1", 0, has_store=True), 5)
    for attempt in (0, 1):
        leader, worker = meet(0, 1, port=store.port, attempt=attempt)
        assert isinstance(leader, RankLink)
        assert isinstance(worker, RankLink)


def test_a_rank_that_joins_twice_is_refused() -> None:
    found = meet(0, 1, 1, timeout_s=2, size=3)
    assert sum("rank 1 has joined already" in str(error) for error in found) == 1


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} within 1 s"):
        Meeting(Place(1, 2, 0, 1, "127.0.0.1", port, has_store=False), 1)


def test_an_address_that_is_not_this_machine_s_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--master-addr 192\.0\.2\.1 and --master-port 29500 cannot be listened on"
    ):
        Meeting(Place(0, 2, 0, 1, "192.0.2.1", 29500, has_store=True), 1)


def test_digests_distinguish_models_of_one_shape(tmp_path: Path) -> None:
    paths = [write_tiny_model(tmp_path / str(seed), TinyModel(seed=seed)) for seed in (1, 2)]
    first, second = (model_digest(open_model_files(path)) for path in paths)
    assert first != second
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    assert model_digest(open_model_files(copy)) == first
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert model_digest(open_model_files(copy)) not in (first, second)


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"accelerator": "emulated:rtx4090-pcie4"}, "ranks compute on CPUs"),
        ({"devices": "cuda:0"}, "--devices cuda:0 was given with --tensor-parallel-size above 1"),
        ({"optimize_config": "rules.yaml"}, "leave it out"),
        ({"packed_cache": "there"}, "leave it out"),
    ],
)
def test_settings_that_do_not_work_with_ranks_are_refused(settings: dict[str, str], printed: str) -> None:
    with pytest.raises(ConfigError, match=printed):
        rank_config(EngineConfig(**settings))  # type: ignore[arg-type]


def test_ranks_use_no_gpu_that_the_machine_has() -> None:
    assert rank_config(EngineConfig()).accelerator == "none"


def test_nccl_that_torch_lacks_is_refused_before_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--distributed-backend nccl: torch \S+ has no NCCL; use gloo"):
        Meeting(Place(0, 2, 0, 1, "127.0.0.1", 0, has_store=True), 1, "nccl")
