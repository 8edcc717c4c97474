"""Replicas behind the routers that people run: vllm-router, sglang-router and nginx, in environments of their own.

TWOFOLD_VLLM_ROUTER and TWOFOLD_SGLANG_ROUTER name their programs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from twofold.tools.loadgen.server_process import serving

from tests.e2e.ports import free_port
from tests.server.fleet.clients import round_robin_hits, second_turn_hits

pytestmark = pytest.mark.slow
NUM_CONVERSATIONS = 40
NGINX_CONF = Path(__file__).resolve().parents[3] / "deploy/routers/nginx.conf"
POLICY = ["--policy", "cache_aware", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    serve = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", "0", "--accelerator", "none"]
    with ExitStack() as running:
        logs = tmp_path_factory.mktemp("replicas")
        yield [
            running.enter_context(serving([*serve, "--cpu-threads", "1"], logs / name, timeout_s=180)).url
            for name in ("one.log", "two.log")
        ]


def command(router: str, port: int, replicas: list[str], folder: Path) -> list[str]:
    """The router's command line. Skips the test if the program is missing."""
    if router == "nginx":
        program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            pytest.skip("nginx is not installed")
        text = NGINX_CONF.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        for shipped, url in zip(re.findall(r"server (127\S+)", text), replicas, strict=True):
            text = text.replace(f"server {shipped}", f"server {url.removeprefix('http://')}")
        (folder / "nginx.conf").write_text(text)
        settings = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
        return [program, "-c", str(folder / "nginx.conf"), "-g", settings]
    name = f"TWOFOLD_{router.upper().replace('-', '_')}"
    if name not in os.environ:
        pytest.skip(f"{router} is not installed; {name} names its program")
    launch = ["launch"] if router == "sglang-router" else []
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    return [os.environ[name], *launch, *ports, *POLICY, "--worker-urls", *replicas]


@pytest.mark.parametrize("router", ["vllm-router", "sglang-router", "nginx"])
def test_second_turns_hit_their_prefix_through_a_router(
    router: str, replicas: list[str], tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(
            command(router, port, replicas, tmp_path), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(url)
            hits = asyncio.run(second_turn_hits(url, NUM_CONVERSATIONS))
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert hits >= 0.95 * NUM_CONVERSATIONS


def test_round_robin_finds_half_of_the_prefixes(replicas: list[str]) -> None:
    """What the routers are compared with."""
    num_conversations = 100
    hits = asyncio.run(round_robin_hits(replicas, num_conversations))
    assert 0.35 * num_conversations <= hits <= 0.55 * num_conversations


def test_sglangs_router_lists_the_model_by_its_name(replicas: list[str], tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(
            command("sglang-router", port, replicas, tmp_path), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(f"http://127.0.0.1:{port}")
            listed = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert {each["id"] for each in listed} == {"twofold-tales"}


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"nothing answers at {url}")
