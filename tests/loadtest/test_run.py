"""`twofold loadtest` as `make loadtest` calls it, against a small server of server-sent events on this machine.

In a process of its own: Locust replaces parts of the standard library as soon as it is imported.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from twofold.telemetry.sink import LoadSample, parse_load_samples

from tests.loadtest.processes import loadtest, samples_of, server

__all__ = ["server"]

from tests.e2e.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_users_chat_and_their_samples_reach_the_server(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = loadtest(server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(server)
    requests = server.requests  # type: ignore[attr-defined]
    assert len(samples) == len(requests) >= 3, done.stdout
    assert {sample.user for sample in samples} == {0, 1, 2}
    assert {sample.request_id for sample in samples} == {request["id"] for request in requests}
    assert all(sample.ok and sample.ttft_ms and sample.tpot_ms for sample in samples)
    assert all(sample.e2e_ms >= sample.ttft_ms for sample in samples)  # type: ignore[operator]
    assert sum(s.completion_tokens for s in samples) == sum(r["max_tokens"] for r in requests)
    assert all(r["stream"] and r["stream_options"] == {"include_usage": True} for r in requests)
    assert {(sample.stage, sample.name, sample.gave_up) for sample in samples} == {
        ("constant", "chat", False)
    }
    assert f"{len(samples)} of {len(samples)} completed" in done.stdout
    assert "TTFT ms" in done.stdout
    assert f"{len(samples):,} samples are in the server's telemetry database" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_server_without_telemetry_leaves_samples_in_a_file(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    server.samples_status = 404  # type: ignore[attr-defined]
    done = loadtest(server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    samples = parse_load_samples({"samples": [json.loads(line) for line in file.read_text().splitlines()]})
    assert len(samples) == len(server.requests)  # type: ignore[attr-defined]
    assert str(file) in done.stdout


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("busy", "HTTP 503: busy"), ("endless", "without [DONE]"), ("hangs-up", "ConnectionError")],
)
def test_failures_are_counted_named_and_fatal(
    server: ThreadingHTTPServer, tmp_path: Path, model: str, complaint: str
) -> None:
    done = loadtest(server, tmp_path, "--model", model)
    assert done.returncode == 1, done.stdout + done.stderr
    samples = samples_of(server)
    assert samples
    assert not any(sample.ok for sample in samples)
    assert f"failed: {len(samples)} × " in done.stdout
    assert complaint in done.stdout
    # What was begun can be looked up among the server's requests, though it broke.
    assert all((sample.request_id is None) == (model == "busy") for sample in samples)


def test_objectives_set_the_exit_code_and_the_open_loop_goes_through_its_stages(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    options = ("--rate", "20", "--shape", "spike", "--mix", "chat,agent", "--json", str(tmp_path / "f.json"))
    missed = loadtest(server, tmp_path, *options, "--slo", "ttft_p95_ms=0.001,e2el_p100_ms=60000")
    assert missed.returncode == 1, missed.stdout + missed.stderr
    assert "missed  ttft p95 ≤ 0.001 ms" in missed.stdout
    samples = samples_of(server)
    assert all(sample.ok for sample in samples)
    assert {sample.name for sample in samples} == {"chat", "agent"}
    assert {sample.stage for sample in samples} >= {"before", "spike"}
    assert [sample.user for sample in samples if sample.stage == "spike"], "conversations have numbers"
    document = json.loads((tmp_path / "f.json").read_text())
    assert [objective["met"] for objective in document["objectives"]] == [False, True]
    assert (document["completed"], document["request_goodput"]) == (len(samples), 0)
    agents = [r["messages"] for r in server.requests if "tools" in r]  # type: ignore[attr-defined]
    assert any([m["role"] for m in messages][2:5] == ["assistant", "tool", "tool"] for messages in agents)


def test_an_impatient_user_hangs_up_which_is_no_failure(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = loadtest(server, tmp_path, "--model", "slow", "--mix", "impatient", "--seconds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(server)
    assert samples
    assert all(sample.ok and sample.gave_up and sample.ttft_ms is None for sample in samples)
    gone = server.gone  # type: ignore[attr-defined]
    assert gone, "some requests reached the server before their user left"
    assert all(gone), "each connection was closed by the client"
    assert f"{len(samples)} users closed the connection on purpose" in done.stdout


def test_locust_counts_each_request_once(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = locust(
        server, tmp_path, "ImpatientUser", "AgentUser", "--csv", str(tmp_path / "locust"), "--run-time", "3s"
    )
    with (tmp_path / "locust_stats.csv").open(newline="") as file:
        rows = {(row["Name"], row["Type"]): int(row["Request Count"]) for row in csv.DictReader(file)}
    samples = samples_of(server)
    num_requests = len(server.requests)  # type: ignore[attr-defined]
    # An impatient user may leave before the server has read the request.
    assert sum(not sample.gave_up for sample in samples) <= num_requests <= len(samples), done
    assert rows["Aggregated", ""] == len(samples) > 3
    assert rows["impatient", "POST"] + rows["agent", "POST"] == len(samples)
    assert rows["agent", "TTFT"] == rows["agent", "POST"], "latencies have rows of their own"


def page_of(server: ThreadingHTTPServer, tmp_path: Path, *arguments: str) -> list[LoadSample]:
    """Samples of a test that Locust's page ran with the form as `loadtest --ui` filled it in."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "loadtest",
        "--ui",
        "--ui-port",
        port,
        "--seconds",
        "2",
    ]
    command += [
        "--host",
        f"http://127.0.0.1:{server.server_port}",
        "--model",
        "good",
        "--output",
        str(tmp_path),
    ]
    with subprocess.Popen([*command, *arguments], start_new_session=True) as process:
        try:
            until = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    form = {"user_count": "4", "spawn_rate": "100", "run_time": "2s"}
                    assert httpx.post(f"http://127.0.0.1:{port}/swarm", data=form).json()["success"]
                    break
                assert time.monotonic() < until
                time.sleep(0.2)
            # "ready" is also what it says before its first user starts; the last samples follow "stopped".
            while (
                httpx.get(f"http://127.0.0.1:{port}/stats/requests").json()["state"] != "stopped"
                or len(samples_of(server)) < len(server.requests)  # type: ignore[attr-defined]
            ):
                assert time.monotonic() < until
                time.sleep(0.2)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is its own
    return samples_of(server)


def test_the_page_starts_the_load_that_was_asked_for(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    load = ("--mix", "chat:3,agent", "--shape", "spike", "--slo", "ttft_p95_ms=500", "--seed", "7")
    samples = page_of(server, tmp_path, *load)
    assert {sample.name for sample in samples} == {"chat", "agent"}
    assert "spike" in {sample.stage for sample in samples}
    plans = [json.loads(sample.plan_json) for sample in samples if sample.plan_json]
    assert plans
    for plan in plans:
        assert (plan["mix"], plan["shape"], plan["seed"]) == ({"chat": 3, "agent": 1}, "spike", 7)
        assert plan["slos"] == [{"metric": "ttft", "percent": 95.0, "limit_ms": 500.0}]


def test_the_page_starts_an_open_loop_that_was_asked_for(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    samples = page_of(server, tmp_path, "--rate", "20", "--mix", "agent")
    assert {sample.name for sample in samples} == {"agent"}
    assert {json.loads(each.plan_json)["rate"] for each in samples if each.plan_json} == {20}


@pytest.mark.slow
def test_wrong_arguments_and_absent_servers_end_with_two(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    for arguments, complaint in (
        (["--users", "0"], "whole number from 1 to 1000"),
        (["--seconds", "1e9"], "number from 1 to 86400"),
        (["--slo", "ttft=5"], "METRIC_pPERCENT_ms=LIMIT is expected"),
        (["--mix", "walker"], "KIND:WEIGHT is expected"),
        (["--output", "/nowhere"], "an existing directory is expected"),
        (["--ui", "--processes", "2"], "--ui and --processes were both given"),
        (["--host", "http://127.0.0.1:9"], "no OpenAI server answers"),
        (["--host", "http://example.com"], "--allow-remote-host"),
    ):
        done = loadtest(server, tmp_path, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_workers_make_one_test_of_all_users(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    """Every sample of two Locust workers names the same test, its own user and, once all have come, all four users."""
    port = str(free_port())
    options = ("--processes", "2", "--users", "4", "--run-time", "4s")
    printed = locust(
        server, tmp_path, "ChatUser", *options, "--master-bind-port", port, "--master-port", port
    )
    samples = samples_of(server)
    assert samples, printed
    assert len({sample.loadtest_id for sample in samples}) == 1
    assert len({sample.user for sample in samples}) == 4
    assert max(sample.num_users for sample in samples) == 4


def locust(server: ThreadingHTTPServer, tmp_path: Path, *arguments: str) -> str:
    """The output of Locust's own command with the project's users; its processes end with this function."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless"),
        *("--users", "4", "--spawn-rate", "100", "--model", "good", "--stop-timeout", "10"),
        *("--host", f"http://127.0.0.1:{server.server_port}", "--output", str(tmp_path), *arguments),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is its own
            raise
    return printed
