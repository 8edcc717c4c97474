"""Loads on a fleet: an objective that is kept while a replica dies, round robin beside the router, several models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from twofold.models.bundled import bundled_model_path
from twofold.tools.loadgen import server_process

from tests.server.fleet.clients import prompt, streams
from tests.server.fleet.ray_cluster import replica_processes, serving

pytestmark = pytest.mark.slow


def test_an_objective_is_kept_while_a_replica_dies(tmp_path: Path) -> None:
    """Two workers of one load test. The only failures are streams of the lost replica."""
    with serving() as url:
        result = tmp_path / "result.json"
        command = [
            sys.executable,
            "-m",
            "twofold.tools.cli",
            "loadtest",
            "--host",
            url,
            "--json",
            str(result),
        ]
        command += ["--processes", "2", "--users", "6", "--spawn-rate", "100", "--seconds", "20"]
        command += ["--max-output-tokens", "48", "--slo", "ttft_p95_ms=4000", "--output", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as test:
            time.sleep(12)
            replica_processes()[0].kill()
            reply, _ = test.communicate(timeout=180)
    document = json.loads(result.read_text())
    assert document["completed"] > 20, reply
    assert [objective["met"] for objective in document["objectives"]] == [True], reply
    assert document["failed"] <= 6
    assert {error["kind"] for error in document["errors"]} <= {"error within the stream"}
    print(f"{document['completed']} completed, {document['failed']} failed, {document['objectives']}")


def test_a_signal_lets_running_answers_finish(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "serve",
        "--ray",
        "--port",
        "0",
        "--cpu-threads",
        "1",
    ]
    with server_process.serving(
        [*command, "--accelerator", "none"], tmp_path / "log", timeout_s=180
    ) as server:

        async def stop(begun: list[asyncio.Event]) -> None:
            await asyncio.gather(*(each.wait() for each in begun))
            os.kill(server.pid, signal.SIGTERM)

        seen = asyncio.run(streams(server.url, first=500, max_tokens=200, num=4, then=stop))
    assert [(each.error, each.is_done) for each in seen] == [(None, True)] * 4
    log = (tmp_path / "log").read_text()
    assert "stopping: running answers may finish" in log
    # Ray reports a controller that is killed during a call as a failed task, in colours.
    assert [line for line in log.splitlines() if "infinite retries" in line or "\x1b" in line] == []


def test_models_stay_on_the_replica_that_has_loaded_them(tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("left", "right")]
    for model in models:
        model.symlink_to(bundled_model_path(), target_is_directory=True)
    with serving(model=str(models[0]), models=[str(models[1])], models_max=1) as url:
        seen: dict[str, set[str]] = defaultdict(set)
        with httpx.Client(base_url=url, timeout=120) as http:
            for number in range(24):
                name = ("left", "right")[number % 2]
                requested = {"model": name, "prompt": prompt(number, 20), "max_tokens": 4}
                answer = http.post("/v1/completions", json=requested)
                answer.raise_for_status()
                assert answer.json()["model"] == name
                if number >= 4:
                    seen[name].add(answer.headers["x-twofold-replica"])
            assert http.post("/v1/completions", json=requested | {"model": "other"}).status_code == 404
    assert len(seen["left"]) == len(seen["right"]) == 1
    assert seen["left"] != seen["right"]
