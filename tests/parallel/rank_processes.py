"""Servers whose ranks are processes, what they print, and answers of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine

from tests.server.live_server import HTTP

START_S = 90
QUICK = ("--tensor-parallel-min-bytes", "0", "--distributed-timeout-s", "20")


def start(
    directory: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    within: Sequence[str] = (),
    program: str = "twofold.tools.cli",
) -> subprocess.Popen[str]:
    """A server as a process. within: the command that runs it. program: the module of `twofold`."""
    command = [*within, sys.executable, "-m", program, "serve", str(directory), "--port", "0"]
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
        yield *url_and_greeting(process), process
    finally:
        end(process)


def url_and_greeting(process: subprocess.Popen[str]) -> tuple[str, str]:
    """URL and greeting of rank 0's server, once it serves."""
    greeting = read_until(process, "ranks")
    url = re.search(r"API +(http\S+)", greeting)
    assert url, greeting
    return url[1], greeting


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


def answer(url: str, http: httpx.Client = HTTP) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = http.post(f"{url}/completions", json=body)
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


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def text_of_a_stream(url: str, after_first: Callable[[], None], http: httpx.Client = HTTP) -> str:
    """All that a streamed answer says; `after_first` is called once it has begun."""
    body = {"prompt": [3, 7, 12], "max_tokens": 200, "ignore_eos": True, "stream": True}
    text = ""
    with (
        contextlib.suppress(httpx.HTTPError),
        http.stream("POST", f"{url}/completions", json=body) as stream,
    ):
        for piece in stream.iter_text():
            if not text:
                after_first()
            text += piece
    return text
