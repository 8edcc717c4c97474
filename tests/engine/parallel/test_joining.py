"""Ranks that meet over a store and gloo: same answers, and one line for each way in which they cannot meet."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.models import open_model_files
from twofold.parallel.identity import model_digest
from twofold.parallel.joining import Meeting
from twofold.parallel.link import STOP, RankLink
from twofold.parallel.place import Place
from twofold.parallel.session import check_settings

from tests.engine.parallel.meeting import IDENTITY, free_port, meet
from tests.server.live_server import HTTP
from tests.tiny_models.writing import TinyModel, write_tiny_model

START_S = 90
QUICK = ("--tensor-parallel-min-bytes", "0", "--distributed-timeout-s", "20")


def start(directory: Path, *flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twofold.tools.cli", "serve", str(directory), "--port", "0"]
    small = ("--accelerator", "none", "--no-auto-fit", "--max-total-tokens", "256", "--cpu-threads", "1")
    return subprocess.Popen(
        [*command, *small, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (environment or {}),
    )


@contextlib.contextmanager
def serving(directory: Path, *flags: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """URL, greeting and process of a server."""
    process = start(directory, *flags)
    try:
        greeting = read_until(process, "ranks" if "--tensor-parallel-size" in flags else "stop")
        url = re.search(r"API +(http\S+)", greeting)
        assert url, greeting
        yield url[1], greeting, process
    finally:
        end(process)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Lines up to the one that begins with `word`; all lines if none does."""
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if line.split()[:1] == [word]:
            break
    return text


def end(process: subprocess.Popen[str]) -> str:
    """End a process as Ctrl-C does; the rest of its output."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


PROMPT = (3, 7, 12, 5, 40, 41, 9)


def answer(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = HTTP.post(f"{url}/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


def answer_of_one_process(directory: Path) -> str:
    config = EngineConfig(model=str(directory), accelerator="none", cpu_threads=1, max_total_tokens=256)
    engine = Engine.load(config)
    texts: list[str] = []
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.generate(PROMPT, sampling, lambda chunk: texts.append(chunk.text))
    engine.close()
    return "".join(texts)


def output_of(process: subprocess.Popen[str], timeout: float = START_S) -> str:
    """All output of a process that ends by itself."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def pids_of_ranks(greeting: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"process (\d+)", greeting)]


def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    expected = answer_of_one_process(directory)
    with serving(directory, "--tensor-parallel-size", "2", *QUICK) as (url, greeting, process):
        assert answer(url) == expected
        rest = end(process)
    assert process.returncode == 0, rest
    assert len(pids_of_ranks(greeting)) == 2
    for pid in pids_of_ranks(greeting):
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
        told = text_of_a_stream(url, lambda: os.kill(pids[killed], signal.SIGKILL))
        killed_at = time.monotonic()
        text = output_of(process, timeout=10)
        while any(map(is_running, pids)) and time.monotonic() - killed_at < 10:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
        assert f"rank {killed}" in text
        assert process.returncode != 0
        if killed > 0:  # rank 0 takes its connections with it
            assert f"rank {killed}" in told
            assert "SIGKILL" in told


def text_of_a_stream(url: str, after_first: Callable[[], None]) -> str:
    """All that a streamed answer says; `after_first` is called once it has begun."""
    body = {"prompt": [3, 7, 12], "max_tokens": 200, "ignore_eos": True, "stream": True}
    text = ""
    with (
        contextlib.suppress(httpx.HTTPError),
        HTTP.stream("POST", f"{url}/completions", json=body) as stream,
    ):
        for piece in stream.iter_text():
            if not text:
                after_first()
            text += piece
    return text


def test_ranks_that_meet_exchange_messages_of_any_size() -> None:
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
    ("field", "said"),
    [
        ("version", "has version 9, rank 0 has 1"),
        ("level", "has CPU level 9, rank 0 has avx2"),
        ("model", r"has model 9, rank 0 has m \(1\)"),
        ("settings", "has settings 9, rank 0 has --x 1"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_sides(field: str, said: str) -> None:
    other = replace(IDENTITY, **{field: "9"})
    for error in meet(0, 1, 2, size=3, identities={2: other}):
        assert isinstance(error, ConfigError)
        assert re.fullmatch(
            rf"rank 2 \(.*, process \d+\) {said}; start all ranks with the same version, model and flags",
            str(error),
        )


def test_a_rank_that_does_not_come_is_named() -> None:
    (error,) = meet(0, timeout_s=1)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("rank 1 did not come to 127.0.0.1:")


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


def test_digests_tell_models_of_one_shape_apart(tmp_path: Path) -> None:
    paths = [write_tiny_model(tmp_path / str(seed), TinyModel(seed=seed)) for seed in (1, 2)]
    first, second = (model_digest(open_model_files(path)) for path in paths)
    assert first != second
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    assert model_digest(open_model_files(copy)) == first


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"accelerator": "emulated:rtx4090-pcie4"}, "ranks compute on CPUs"),
        ({"optimize_config": "rules.yaml"}, "leave it out"),
        ({"packed_cache": "there"}, "leave it out"),
    ],
)
def test_settings_that_do_not_work_with_ranks_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(EngineConfig(**settings))  # type: ignore[arg-type]
