"""Several processes of `twofold loadtest` as one test with one result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from twofold.tools.cli.main import main
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.metrics import Sample
from twofold.tools.loadgen.sample_messages import as_message, from_message

from tests.e2e.ports import free_port
from tests.loadtest.processes import loadtest, samples_of, server

__all__ = ["server"]


def test_a_sample_survives_its_way_to_the_master() -> None:
    answer = AnswerStream(5.0)
    for number, at_s in enumerate((5.5, 5.6)):
        answer.line(b'data: {"choices": [{"delta": {"content": "w%d"}}]}' % number, at_s)
    answer.line(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": null}', 5.7)
    answer.line(b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}', 5.7)
    answer.line(b"data: [DONE]", 6.0)
    sample = Sample(7, 2, answer, 0.1, None, None, name="chat", stage="hold", num_users=4, finished_s=99.0)
    got = from_message(json.loads(json.dumps(as_message(sample, 1000.0))))
    assert (got.number, got.turn, got.name, got.num_users, got.complete) == (7, 2, "chat", 4, True)
    for name in ("ttft_ms", "e2el_ms", "tpot_ms", "completion_tokens", "prompt_tokens"):
        assert getattr(got.answer, name) == pytest.approx(getattr(answer, name))
    assert got.answer.itls_ms == pytest.approx(answer.itls_ms, abs=1e-3)
    assert got.answer.sent_s == 1005.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--worker", "--processes", "2"], "--worker and --processes were both given"),
        (["--worker", "--master"], "--worker and --master were both given"),
        (["--expect-workers", "2"], "--expect-workers was given without --master"),
    ],
)
def test_options_that_exclude_one_another(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadtest", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_processes_write_one_result(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    flags = ("--processes", "2", "--users", "4", "--spawn-rate", "100", "--seconds", "5")
    done = loadtest(server, tmp_path, *flags, "--json", str(tmp_path / "f.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(server)
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["completed"] == len(samples) == len(server.requests) > 3  # type: ignore[attr-defined]
    assert len({sample.loadtest_id for sample in samples}) == 1
    users = {sample.user for sample in samples}
    assert len(users) == 4
    assert len({user // 100_000 for user in users}) == 2  # both workers had some
    assert 0 < document["p95_ttft_ms"] < 5000


@pytest.mark.slow
def test_workers_share_the_arrivals_of_an_open_loop(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    flags = ("--rate", "8", "--seconds", "5", "--mix", "long-prompt", "--seed", "3")
    assert loadtest(server, tmp_path, *flags).returncode == 0
    alone = len(server.requests)  # type: ignore[attr-defined]
    server.requests.clear()  # type: ignore[attr-defined]
    done = loadtest(server, tmp_path, *flags, "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    together = len(server.requests)  # type: ignore[attr-defined]
    # Users think for other times by their number; all arrivals twice, or half of them, would be far off.
    assert 0.65 * alone <= together <= 1.5 * alone
    assert len({sample.user // 100_000 for sample in samples_of(server)}) == 2
    assert alone > 15


@pytest.mark.slow
def test_a_lost_worker_leaves_the_result_of_the_others(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "twofold.tools.cli", "loadtest"]
    host = ("--host", f"http://127.0.0.1:{server.server_port}", "--output", str(tmp_path))
    master = subprocess.Popen(
        [
            *(*command, *host, "--master", "--expect-workers", "2", "--master-bind-port", port),
            *("--users", "4", "--spawn-rate", "100", "--seconds", "12", "--json", str(tmp_path / "f.json")),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [subprocess.Popen([*command, "--worker", "--master-port", port]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while len(server.requests) < 4 and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.1)
        workers[0].send_signal(signal.SIGKILL)
        _, printed = master.communicate(timeout=150)
        assert workers[1].wait(timeout=30) == 0
    finally:
        for process in (master, *workers):
            if process.poll() is None:
                process.kill()
            process.wait()
    assert "1 workers were lost" in printed
    assert json.loads((tmp_path / "f.json").read_text())["completed"] >= 4
    assert not psutil.Process().children()
