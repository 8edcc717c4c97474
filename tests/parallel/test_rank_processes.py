"""`twofold serve` on ranks that are processes of this machine: same answers, and losses that are named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.ports import free_port
from tests.parallel.rank_processes import (
    QUICK,
    answer,
    answer_of_one_process,
    end,
    is_running,
    output_of,
    pids_of_ranks,
    read_until,
    serving,
    start,
    text_of_a_stream,
    url_and_greeting,
)
from tests.tiny_models.writing import TinyModel, write_tiny_model


def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    expected = answer_of_one_process(directory)
    with serving(directory, "--tensor-parallel-size", "2", *QUICK) as (url, greeting, process):
        assert answer(url) == expected
        pids = pids_of_ranks(greeting)
        bound = [os.sched_getaffinity(pid) for pid in pids]
        rest = end(process)
    assert process.returncode == 0, rest
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    own = os.sched_getaffinity(0)
    assert bound[0] | bound[1] == own
    assert not bound[0] & bound[1] or len(own) == 1


def test_generate_answers_on_ranks_as_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    command = [sys.executable, "-m", "twofold.tools.cli", "generate", str(directory), "--accelerator", "none"]
    command += ["--raw", "--temperature", "0", "--max-tokens", "8", "--prompt", "Once"]
    alone, ranks = (
        subprocess.run([*command, *further], capture_output=True, text=True, check=False)
        for further in ((), ("--tensor-parallel-size", "2", *QUICK))
    )
    assert (ranks.returncode, ranks.stdout) == (0, alone.stdout), ranks.stderr
    assert "WARNING" not in ranks.stderr


def test_messages_through_device_memory_give_the_same_answer(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    expected = answer_of_one_process(directory)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ("--tensor-parallel-size", "2", *QUICK, "--distributed-backend", "nccl")
    ranks = [
        start(
            directory,
            *flags,
            environment=place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            program="tests.parallel.nccl_stand_in",
        )
        for rank in (0, 1)
    ]
    try:
        url, _ = url_and_greeting(ranks[0])
        assert answer(url) == expected
        rest = end(ranks[0]) + output_of(ranks[1])
        assert [process.returncode for process in ranks] == [0, 0], rest
    finally:
        for process in ranks:
            process.kill()


def test_an_unreachable_rank_0_is_one_line(tmp_path: Path) -> None:
    directory, port = write_tiny_model(tmp_path, TinyModel()), free_port()
    place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost", "--master-port", str(port))
    process = start(directory, "--tensor-parallel-size", "2", *place, "--distributed-timeout-s", "1")
    assert output_of(process) == (
        f"twofold serve: rank 1 cannot reach rank 0 at localhost:{port} within 1 s; start rank 0, and check "
        "--master-addr and --master-port\n"
    )
    assert process.returncode == 2


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    expected = answer_of_one_process(directory)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "-m",
        "twofold.tools.cli",
        "serve",
        str(directory),
        "--port",
        "0",
        "--accelerator",
        "none",
        "--max-total-tokens",
        "256",
        "--tensor-parallel-size",
        "2",
        *QUICK,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        greeting = read_until(process, "ranks")
        url = re.search(r"API +(http\S+)", greeting)[1]  # type: ignore[index]
        assert answer(url) == expected
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_ends_all_with_its_name(killed: int, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    with serving(directory, "--tensor-parallel-size", "3", *QUICK) as (url, greeting, process):
        pids = pids_of_ranks(greeting)
        reported = text_of_a_stream(url, lambda: os.kill(pids[killed], signal.SIGKILL))
        killed_at = time.monotonic()
        text = output_of(process, timeout=10)
        while any(map(is_running, pids)) and time.monotonic() - killed_at < 10:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
        assert f"rank {killed}" in text
        assert process.returncode != 0
        if killed > 0:  # rank 0 takes its connections with it
            assert f"rank {killed}" in reported
            assert "SIGKILL" in reported
            assert "Traceback" not in text
