"""Ranks that meet over a store and gloo: same answers, and one line for each way in which they cannot meet."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.models.drawn_families import EXAMPLES
from tests.server.live_server import HTTP
from tests.tiny_models.writing import TinyModel, write_tiny_model

START_S = 90
QUICK = ("--tensor-parallel-min-bytes", "0", "--distributed-timeout-s", "20")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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


def answer(url: str) -> str:
    body = {"prompt": [3, 7, 12, 5, 40, 41, 9], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = HTTP.post(f"{url}/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


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
    with serving(directory) as (url, _, _):
        expected = answer(url)
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
@pytest.mark.parametrize("family", EXAMPLES)
def test_every_family_answers_as_one_process(family: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, EXAMPLES[family])
    with serving(directory) as (url, _, _):
        expected = answer(url)
    with serving(directory, "--tensor-parallel-size", "2", *QUICK) as (url, _, _):
        assert answer(url) == expected


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    with serving(directory) as (url, _, _):
        expected = answer(url)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "-m", "twofold.tools.cli", "serve", str(directory), "--port", "0", "--accelerator", "none",
        "--max-total-tokens", "256", "--tensor-parallel-size", "2", *QUICK,
    ]  # fmt: skip
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


def one_line(text: str) -> str:
    told = [line for line in text.splitlines() if line.startswith("twofold serve:")]
    assert len(told) == 1, text
    return told[0]


def two_machines(first: Path, second: Path, *flags: str, same_rank: bool = False) -> tuple[str, str]:
    """Outputs of two processes that stand for two machines, at 127.0.0.1."""
    port = str(free_port())

    def of(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    common = ("--tensor-parallel-size", "2", "--distributed-timeout-s", "10")
    a = start(first, *common, environment=of(0))
    b = start(second, *common, *flags, environment=of(0 if same_rank else 1))
    return output_of(a), output_of(b)


def test_another_model_is_refused_on_both_sides(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "first", TinyModel())
    second = write_tiny_model(tmp_path / "second", TinyModel(seed=5))
    for text in two_machines(first, second):
        assert re.search(r"rank 1 \(.*\) has model second \(.*\), rank 0 has first \(", one_line(text)), text


def test_other_settings_are_refused_on_both_sides(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    for text in two_machines(directory, directory, "--no-enable-expert-parallel"):
        assert "rank 1" in one_line(text)
        assert "--enable-expert-parallel False" in text


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ("--tensor-parallel-size", "2", "--distributed-timeout-s", "1")
    text = output_of(start(directory, *flags, environment=place))
    assert "rank 1 did not come to 127.0.0.1" in one_line(text)


def test_a_store_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    port = free_port()
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ("--tensor-parallel-size", "2", "--distributed-timeout-s", "1")
    text = output_of(start(directory, *flags, environment=place))
    assert f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}" in one_line(text)


def test_a_rank_that_joins_twice_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    port = free_port()
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ("--tensor-parallel-size", "3", "--distributed-timeout-s", "6")
    ranks = [
        start(directory, *flags, environment=place | {"RANK": rank, "WORLD_SIZE": "3"}) for rank in "011"
    ]
    texts = [output_of(each) for each in ranks]
    assert sum("rank 1 has joined already" in text for text in texts) == 1, texts


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--accelerator", "emulated:rtx4090-pcie4"), "ranks compute on CPUs"),
        (("--num-redundant-experts", "2"), "without --init-expert-location"),
        (("--nnodes", "2"), "which other machines cannot reach"),
    ],
)
def test_settings_that_do_not_work_with_ranks_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    text = output_of(start(directory, "--tensor-parallel-size", "2", *flags))
    assert any(said in line for line in text.splitlines() if line.startswith("twofold serve:")), text
