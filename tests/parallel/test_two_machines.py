"""Ranks on two machines, which are network namespaces of this one: same answers, and losses that are named."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.parallel.rank_processes import (
    answer,
    answer_of_one_process,
    end,
    output_of,
    start,
    text_of_a_stream,
    url_and_greeting,
)
from tests.parallel.two_machines import Machine, two_machines
from tests.tiny_models.writing import TinyModel, write_tiny_model

pytestmark = pytest.mark.slow
PORT = "29555"


def start_rank(
    rank: int, directory: Path, machines: tuple[Machine, Machine], *flags: str
) -> subprocess.Popen[str]:
    place = (
        "--nnodes",
        "2",
        "--node-rank",
        str(rank),
        "--master-addr",
        machines[0].address,
        "--master-port",
        PORT,
    )
    size = (
        "--tensor-parallel-size",
        "2",
        "--tensor-parallel-min-bytes",
        "0",
        "--distributed-timeout-s",
        "20",
    )
    return start(directory, *size, *place, *flags, within=machines[rank].within)


@contextlib.contextmanager
def two_ranks(
    directory: Path, *flags: str
) -> Iterator[tuple[tuple[Machine, Machine], list[subprocess.Popen[str]]]]:
    """One rank on each of two machines. All processes have ended before the machines go."""
    with two_machines() as machines:
        ranks = [start_rank(rank, directory, machines, *flags) for rank in (0, 1)]
        try:
            yield machines, ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def test_two_machines_answer_as_one_process(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    expected = answer_of_one_process(directory)
    with two_ranks(directory) as (machines, ranks), httpx.Client(timeout=30, trust_env=False) as http:
        url, greeting = url_and_greeting(ranks[0])
        assert greeting.count("process ") == 2
        with machines[0].here():
            assert answer(url, http) == expected
        rest = end(ranks[0]) + output_of(ranks[1], timeout=20)
        assert [process.returncode for process in ranks] == [0, 0], rest


def kill(rank: int) -> Callable[[tuple[Machine, Machine], list[subprocess.Popen[str]]], None]:
    return lambda machines, ranks: ranks[rank].kill()


@pytest.mark.parametrize(
    ("lose", "flags", "within_s"),
    [
        (kill(0), (), 10),
        (kill(1), (), 10),
        (lambda machines, ranks: machines[1].pull_cable(), ("--distributed-timeout-s", "3"), 20),
    ],
    ids=["rank 0 killed", "rank 1 killed", "cable pulled"],
)
def test_the_other_machine_ends_and_names_the_lost_rank(
    lose: Callable[[tuple[Machine, Machine], list[subprocess.Popen[str]]], None],
    flags: tuple[str, ...],
    within_s: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    with two_ranks(directory, *flags) as (machines, ranks), httpx.Client(timeout=30, trust_env=False) as http:
        url, _ = url_and_greeting(ranks[0])
        with machines[0].here():
            text_of_a_stream(url, lambda: lose(machines, ranks), http)
        began = time.monotonic()
        texts = [output_of(process, timeout=within_s) for process in ranks]
        assert time.monotonic() - began < within_s
        for rank, process in enumerate(ranks):
            assert process.returncode != 0
            if process.returncode != -9:
                assert f"rank {1 - rank} (" in texts[rank]
