"""Batched decode compared with llama.cpp: the orders to the workers, and the evaluation of their answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import batched
from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.shapes import FULL_SHAPES
from benchmarks.peers.workers import batched_worker


def test_medians_over_turns_and_the_same_task_for_both(fake_python, calls_of, capsys) -> None:
    ours = fake_python("ours", [{"batch": 1, "decode_s": 1.0}, {"batch": 16, "decode_s": 2.0}])
    llama = fake_python("llama", [{"batch": 1, "decode_s": 2.0}, {"batch": 16, "decode_s": 8.0}])
    flags = ["m.gguf", "--batches", "1,16", "--new-tokens", "8", "--rounds", "2"]
    assert batched.main([*flags, "--twofold-python", ours, "--llama-python", llama]) == 0
    printed = capsys.readouterr().out
    assert "| 1 | 8.0 | 4.0 | 2.00× |" in printed
    assert "| 16 | 64.0 | 16.0 | 4.00× |" in printed
    assert [len(calls_of(python)) for python in (ours, llama)] == [2, 2]
    assert json.loads(calls_of(ours)[0][1]) == json.loads(calls_of(llama)[0][1])


def test_an_engine_that_leaves_a_number_out_is_an_error(fake_python, capsys) -> None:
    python = fake_python("python", [{"batch": 1, "decode_s": 1.0}])
    flags = ["--batches", "1,4", "--twofold-python", python, "--llama-python", python]
    assert batched.main(["m.gguf", *flags]) == 2
    assert "did not measure every number" in capsys.readouterr().err


def test_our_worker_times_steps_in_which_all_sequences_take_part(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, FULL_SHAPES["tiny"], "q8_0", 1)
    task = {
        "model": str(path),
        "batches": [1, 3],
        "prompt_tokens": 8,
        "new_tokens": 4,
        "threads": 1,
        "seed": 0,
    }
    done = subprocess.run(
        [sys.executable, str(Path(batched_worker.__file__)), json.dumps(task)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["batch"] for line in lines] == [1, 3]
    assert all(0 < line["python_s"] < line["decode_s"] for line in lines)
