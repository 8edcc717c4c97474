"""`twofold serve` as a user runs it: a process, a model, a database, a signal."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import openai
import twofold

from tests.tiny_models.writing import write_tiny_model


def start(model: Path, database: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWOFOLD_")}
    environment["PYTHONPATH"] = str(Path(twofold.__file__).parents[1])
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--cpu-threads",
        "1",
    ]
    command += ["--accelerator", "emulated:rtx4090-pcie4", "--gpu-experts-ratio", "0.5"]
    command += ["--telemetry-url", f"sqlite:///{database}"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_serve_greets_answers_records_and_drains(tmp_path):
    database = tmp_path / "telemetry.db"
    process = start(write_tiny_model(tmp_path / "tiny"), database)
    try:
        greeting = []
        for line in process.stdout:
            greeting.append(line)
            if "note: the GPU is emulated" in line:
                break
        reported = "".join(greeting)
        assert "Twofold" in reported, process.stderr.read()
        assert "emulated:rtx4090-pcie4" in reported
        assert str(database) in reported
        url = next(word for word in reported.split() if word.startswith("http://127.0.0.1:"))
        client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
        question = [{"role": "user", "content": "Tell me of the fox"}]
        stream = client.chat.completions.create(
            model="tiny", messages=question, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.wait(60) == 0
        reply = process.stderr.read().splitlines()
        assert reply[0].startswith("fit: ")
        assert all(line.startswith("  ") for line in reply[1:-1])
        assert re.fullmatch(r"[\d:]{8} INFO twofold.server: loaded tiny in [\d.]+ s", reply[-1])
    finally:
        process.kill()
        process.communicate()
    with sqlite3.connect(database) as connection:
        (finished,) = connection.execute(
            "select count(*) from request where finish_reason = 'length'"
        ).fetchone()
        (placements,) = connection.execute("select count(*) from token_layer").fetchone()
        (accelerator,) = connection.execute("select accelerator from run").fetchone()
    assert finished == 1
    assert placements > 100
    assert accelerator == "emulated:rtx4090-pcie4"


def test_serve_with_a_closed_pipe_ends_with_code_0(tmp_path):
    """`twofold serve … | head -1`, then SIGTERM."""
    process = start(write_tiny_model(tmp_path / "tiny"), tmp_path / "telemetry.db")
    try:
        assert process.stdout.readline()
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "BrokenPipeError" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
