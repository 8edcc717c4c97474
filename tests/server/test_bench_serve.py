"""`twofold bench serve` against the server around the fake engine, over a real socket."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, ListSink
from live_server import serving
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app
from twofold.tools.cli import main as cli
from twofold.tools.loadgen.server_process import serving as running


def bench(url: str, *flags: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON's only result)."""
    file = tmp_path / "results.json"
    code = cli.main(["bench", "serve", "--base-url", url, "--json", str(file), *flags])
    document = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    (result,) = document["results"]
    return code, result


def test_every_answer_is_counted_with_its_tokens_and_times(url, engine, tmp_path, capsys):
    flags = ("--num-prompts", "6", "--max-concurrency", "3", "--input-len", "16", "--output-len", "5")
    code, result = bench(url, *flags, "--goodput", "ttft:60000", tmp_path=tmp_path)
    assert code == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (96, 30)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for sample in result["samples"]:
        assert 0 < sample["ttft_ms"] <= sample["e2el_ms"] < 60_000
        assert len(sample["itls_ms"]) == 4
        assert sample["e2el_ms"] >= sample["ttft_ms"] + sum(sample["itls_ms"]) - 0.01
    # The first run was the warm-up.
    assert len(engine.requests) == 7
    assert all(len(request.prompt_token_ids) == 16 for request in engine.requests)
    assert "16 + 5 tokens, 3 at once: 6 of 6 completed" in capsys.readouterr().out


def test_a_refusal_of_the_server_is_reported_and_ends_with_code_1(tmp_path, capsys):
    full = FakeEngine(max_running=2)
    with serving(create_app(full, ServerConfig())) as url:
        full.hold.clear()
        flags = ("--num-prompts", "8", "--max-concurrency", "8", "--num-warmups", "0", "--timeout", "2")
        code, result = bench(url, *flags, "--input-len", "8", "--output-len", "4", tmp_path=tmp_path)
        full.hold.set()
    full.close()
    assert code == 1
    assert {error["kind"]: error["count"] for error in result["errors"]} == {
        "HTTP 429 rate_limit_exceeded": 6,
        "timeout": 2,
    }
    assert "failed: 6 × HTTP 429 rate_limit_exceeded: all places are taken" in capsys.readouterr().out


def test_conversations_are_chats_with_their_history(url, engine, tmp_path):
    flags = ("--num-prompts", "2", "--num-turns", "3", "--input-len", "10", "--turn-input-len", "4")
    code, result = bench(url, *flags, "--output-len", "3", "--num-warmups", "0", tmp_path=tmp_path)
    assert code == 0
    assert [turn["completed"] for turn in result["turns"]] == [2, 2, 2]
    # The fake says the prompt back and its template adds nothing: 10, then + 3 + 4 each turn.
    assert [turn["mean_input_tokens"] for turn in result["turns"]] == [10, 17, 24]


def test_a_key_comes_from_the_environment(engine, tmp_path, monkeypatch, capsys):
    flags = ("--num-prompts", "1", "--input-len", "4", "--output-len", "2")
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert cli.main(["bench", "serve", "--base-url", url, *flags]) == 1
        assert "API key" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        assert bench(url, *flags, tmp_path=tmp_path)[0] == 0


def test_the_samples_reach_the_dashboards_database_a_stage_for_each_load(engine, capsys):
    sink = ListSink()
    flags = ["--num-prompts", "3", "--max-concurrency", "1,2", "--input-len", "8", "--output-len", "4"]
    with serving(create_app(engine, ServerConfig(), sink)) as url:
        assert cli.main(["bench", "serve", "--base-url", url, *flags]) == 0
        stages = [row.stage for row in sink.rows]
        assert stages == ["8 + 4 tokens, 1 at once"] * 3 + ["8 + 4 tokens, 2 at once"] * 3
        assert len({row.loadtest_id for row in sink.rows}) == 1
        requested = [request.request_id for request in engine.requests]
        assert {row.request_id for row in sink.rows} < set(requested)
        assert max(row.num_users for row in sink.rows) == 2
        assert all(row.ok and row.ttft_ms and row.completion_tokens == 4 for row in sink.rows)
        assert (
            f"6 samples are in the server's telemetry database and on its dashboard, as {sink.rows[0].loadtest_id}"
            in (capsys.readouterr().out)
        )
        assert cli.main(["bench", "serve", "--base-url", url, *flags, "--no-record"]) == 0
    assert len(sink.rows) == 6


def test_a_missed_objective_ends_with_code_1(url, tmp_path, capsys):
    flags = ("--num-prompts", "4", "--input-len", "8", "--output-len", "4")
    code, result = bench(url, *flags, "--slo", "ttft_p95_ms=60000", tmp_path=tmp_path)
    assert (code, [check["met"] for check in result["objectives"]]) == (0, [True])
    limits = "ttft_p95_ms=60000,e2el_p50_ms=0.001"
    code, result = bench(url, *flags, "--slo", limits, tmp_path=tmp_path)
    assert (code, [check["met"] for check in result["objectives"]]) == (1, [True, False])
    assert result["request_goodput"] == 0
    assert result["objectives"][1]["value_ms"] == pytest.approx(result["median_e2el_ms"])
    assert "missed  e2el p50 ≤ 0.001 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo", "ttft=5"], "METRIC_pPERCENT_ms=LIMIT is expected"),
        (["--base-url", "http://example.com"], "--allow-remote-host"),
        (["--base-url", "http://127.0.0.1:1"], "no OpenAI server answers"),
        (["some-model", "--base-url", "http://127.0.0.1:1"], "give one"),
        (["--num-turns", "2", "--endpoint", "/v1/completions"], "conversations are chats"),
        (["--random-prefix-len", "1024"], "must be below --input-len, 1024"),
        (["--num-prompts", "100000", "--output-len", "1000000"], "lower one of these"),
        (["/nowhere/at-all"], "no such model"),
    ],
)
def test_what_cannot_be_measured_is_one_line(flags, words, capsys):
    assert cli.main(["bench", "serve", *flags]) in (1, 2)
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1
    assert words in reported


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--goodput", "itl:5"),
        ("--goodput", "ttft:fast"),
        ("--input-len", "0"),
        ("--input-len", "8,"),
        ("--max-concurrency", "5000"),
        ("--request-rate", "nan"),
        ("--burstiness", "0"),
        ("--extra-body", "[]"),
        ("--temperature", "3"),
    ],
)
def test_a_flag_out_of_range_is_refused(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", flag, value])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_its_own_server_is_found_by_what_it_prints_and_ended(tmp_path):
    program = "import time; print('  API          http://127.0.0.1:4321/v1', flush=True); time.sleep(600)"
    with running([sys.executable, "-c", program], tmp_path / "log", timeout_s=60) as server:
        assert server.url == "http://127.0.0.1:4321"
        assert os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    with pytest.raises(ChildProcessError):  # reaped; its number may be another process's by now
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    with (
        pytest.raises(ConfigError, match=r"did not become ready: loading"),
        running([sys.executable, "-c", program.replace("API", "loading")], tmp_path / "log", timeout_s=0.5),
    ):
        pass


@pytest.mark.slow
def test_it_serves_a_model_of_its_own(tmp_path):
    file = tmp_path / "results.json"
    model = str(bundled_model_path())
    server = "--accelerator none --cpu-threads 1"
    flags = ("--num-prompts", "2", "--input-len", "64", "--output-len", "8", "--server-args", server)
    assert cli.main(["bench", "serve", model, "--json", str(file), *flags]) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (128, 16)
