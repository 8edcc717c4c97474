"""Commands to the engines and parsing of their answers; interpreters that print JSON lines stand in for the peers."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.gguf_model import write_model
from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.engines import (
    WORKERS,
    LlamaEngine,
    Round,
    TwofoldEngine,
    Workload,
    alternate,
    round_of,
)
from benchmarks.peers.workers.llama_worker import check_settings, settings_in
from benchmarks.scenario import BenchmarkError

WORK = Workload(prompt_tokens=100, new_tokens=10, repeats=3, threads=2, seed=7, vocab=512)
MODEL = Path("models/m.gguf")


def bench_line(pp: float, tg: float) -> dict[str, object]:
    return {"twofold": {"prefill_tokens_per_s": pp, "decode_tokens_per_s": tg}, "cpu_isa": "avx2"}


def worker_lines(*pairs: tuple[float, float]) -> list[dict[str, object]]:
    loaded: dict[str, object] = {"load_s": 0.5, "version": "9"}
    return [loaded, *({"prefill_s": prefill, "decode_s": decode} for prefill, decode in pairs)]


def test_the_prompt_is_the_one_that_twofold_draws() -> None:
    draw = random.Random(7)
    assert WORK.prompt == [draw.randrange(512) for _ in range(100)]


def test_a_round_is_the_median_of_its_repeats() -> None:
    measured = round_of(worker_lines((1.0, 1.0), (0.5, 0.1), (2.0, 0.2)), WORK, "x")
    assert (measured.pp, measured.tg) == (100.0, 50.0)
    assert measured.details == {"load_s": 0.5, "version": "9"}


def test_twofold_is_run_on_the_file_with_the_same_prompt(fake_python, calls_of) -> None:
    python = fake_python("twofold-python", [bench_line(300.0, 20.0)])
    assert TwofoldEngine(python).measure(MODEL, WORK) == Round(300.0, 20.0, {"cpu_isa": "avx2"})
    (call,) = calls_of(python)
    assert call[:4] == ["-m", "twofold.tools.cli", "bench", str(MODEL)]
    reported = dict(itertools.pairwise(call))
    # The first of N + 1 new tokens comes out of the prompt's step, so N steps are timed.
    assert (reported["--new-tokens"], reported["--random-prompt"], reported["--cpu-threads"]) == (
        "11",
        "7",
        "2",
    )


def test_llama_tries_its_switches_once_and_keeps_the_best_for_each_test(
    tmp_path, fake_python, calls_of
) -> None:
    python = fake_python("llama-python", [])
    answers = Path(python)
    # Without flash attention its prompt is faster, without mapping its single tokens are.
    source = answers.read_text(encoding="utf-8").replace(
        "print('')",
        "task = json.loads(sys.argv[2])\n"
        "prefill = 1.0 if task['flash_attention'] else 0.5\n"
        "decode = 1.0 if task['mmap'] else 0.1\n"
        "for _ in range(task['repeats']): print(json.dumps({'prefill_s': prefill, 'decode_s': decode}))",
    )
    answers.write_text(source, encoding="utf-8")
    engine = LlamaEngine(python)
    measured = engine.measure(MODEL, WORK)
    assert (measured.pp, measured.tg) == (200.0, 100.0)
    assert measured.details["settings"]["pp"] == {"flash_attention": False, "mmap": True, "repack": True}
    assert measured.details["settings"]["tg"] == {"flash_attention": True, "mmap": False, "repack": True}
    assert len(calls_of(python)) == 4 + 2
    engine.measure(MODEL, WORK)
    assert len(calls_of(python)) == 4 + 2 + 2
    task = json.loads(calls_of(python)[-1][1])
    assert (task["prompt"], task["threads"], task["new_tokens"]) == (WORK.prompt, 2, 10)


def test_a_setting_that_the_library_refuses_falls_out(tmp_path, fake_python) -> None:
    python = fake_python("llama-python", [])
    answers = Path(python)
    source = answers.read_text(encoding="utf-8").replace(
        "print('')",
        "task = json.loads(sys.argv[2])\n"
        "if task['repack']: sys.exit('no such panels')\n"
        "for _ in range(task['repeats']): print(json.dumps({'prefill_s': 0.5, 'decode_s': 0.1}))",
    )
    answers.write_text(source, encoding="utf-8")
    measured = LlamaEngine(python).measure(MODEL, WORK)
    assert measured.details["settings"]["tg"] == {"flash_attention": True, "mmap": True, "repack": False}
    answers.write_text(source.replace("task['repack']", "task"), encoding="utf-8")
    with pytest.raises(BenchmarkError, match="no such panels"):
        LlamaEngine(python).measure(MODEL, WORK)


def test_settings_that_ik_does_not_log_are_an_error() -> None:
    log = (
        "============ Repacked 43 tensors\n"
        "llama_init_from_model: n_batch       = 64\n"
        "llama_init_from_model: fused_moe     = 1\n"
        "llama_init_from_model: ser           = -1, 0\n"
    )
    reported = settings_in(log)
    assert reported == {"n_batch": 64, "fused_moe": 1, "repacked": 1}
    check_settings({"n_batch": 64, "repacked": 1}, reported)
    for wanted in ({"fused_moe": 0}, {"flash_attn": 1}):
        with pytest.raises(RuntimeError, match=f"{next(iter(wanted))} = "):
            check_settings(wanted, reported)
    assert settings_in(log.replace("43", "0"))["repacked"] == 0


LLAMA_CPP = """
import ctypes
from types import SimpleNamespace

__version__, llama_token = "9", ctypes.c_int32
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_model_load_from_file = llama_init_from_model = lambda model, params: vars(params)
llama_print_system_info = lambda: b"AVX2"
llama_vocab_n_tokens = lambda vocab: 4
llama_batch_get_one = lambda tokens, count: list(tokens)
llama_batch_init = lambda count, embedded, sequences: Batch(count)
llama_decode = lambda context, tokens: int(bool(print(context["n_batch"], *tokens)))
llama_memory_seq_cp = lambda memory, *what: print("copy", *what)
llama_memory_seq_rm = lambda memory, *what: print("remove", *what)


class Batch(SimpleNamespace):
    def __init__(self, count):
        names = ("token", "pos", "n_seq_id", "logits")
        super().__init__(seq_id=[[0] for _ in range(count)], **{name: [0] * count for name in names})

    def __iter__(self):
        return (f"{token}@{at}in{to[0]}" for token, at, to in zip(self.token, self.pos, self.seq_id))


__getattr__ = lambda name: lambda *arguments: None
"""
"""A llama-cpp-python that prints the batches to be decoded."""


def lines_of_llama(folder: Path, **changes: Any) -> list[str]:
    (folder / "llama_cpp.py").write_text(LLAMA_CPP, encoding="utf-8")
    task = {"library": "llama.cpp", "model": "m.gguf", "prompt": [5, 6, 7], "new_tokens": 2, "repeats": 1}
    command = [sys.executable, str(WORKERS / "llama_worker.py"), json.dumps(task | {"threads": 1} | changes)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    return done.stdout.splitlines()


def test_the_worker_of_llama_warms_up_and_decodes_the_prompt_then_single_tokens(tmp_path: Path) -> None:
    loaded, *rest, measured = lines_of_llama(tmp_path)
    assert json.loads(loaded)["version"] == "9"
    assert rest == ["32 1 2 3", "32 1", "32 2"] * 2
    assert json.loads(measured).keys() == {"prefill_s", "decode_s"}


def test_the_worker_of_llama_reads_a_context_once_and_keeps_it(tmp_path: Path) -> None:
    _, *rest, _ = lines_of_llama(tmp_path, depth=5)
    filled = ["32 1@0in1 2@1in1 3@2in1", "copy 1 2 -1 -1", "remove 1 -1 -1"]
    filled += ["32 1@3in1 2@4in1", "copy 1 2 -1 -1", "remove 1 -1 -1"]
    turn = ["remove 0 -1 -1", "copy 2 0 -1 -1", "32 1 2 3", "32 1", "32 2"]
    assert rest == [*filled, *turn, *turn]


@pytest.mark.parametrize("lines", [[], [{"load_s": 1.0}], [[1]], [{"twofold": None}]])
def test_an_engine_without_figures_is_an_error(fake_python, lines) -> None:
    python = fake_python("python", lines)
    for engine in (TwofoldEngine(python), LlamaEngine(python)):
        with pytest.raises(BenchmarkError, match="printed no"):
            engine.measure(MODEL, WORK)


@dataclass
class Scripted:
    """An engine that gives prepared rounds and notes whose turn it was; a text is an error."""

    name: str
    rounds: list[Round | str]
    log: list[str]

    def measure(self, model: Path, work: Workload) -> Round:
        self.log.append(self.name)
        reported = self.rounds.pop(0)
        if isinstance(reported, str):
            raise BenchmarkError(reported)
        return reported


def test_engines_take_turns_and_one_that_fails_is_left_out_and_named() -> None:
    log: list[str] = []
    ours = Scripted("twofold", [Round(1000, 60), Round(1200, 40), Round(1100, 50)], log)
    theirs = Scripted("llama.cpp", [Round(500, 30), "out of memory"], log)
    outcome = alternate([ours, theirs], MODEL, WORK, "q8_0", 3)
    assert log == [*("twofold", "llama.cpp") * 2, "twofold"]
    assert outcome.left_out == {"llama.cpp": "out of memory"}
    assert outcome.samples("twofold", "pp") == [1000, 1200, 1100]
    assert outcome.samples("llama.cpp", "tg") == [30]


def run_worker(task: dict[str, object]) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, str(WORKERS / "engine_worker.py"), json.dumps(task)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_our_worker_loads_holds_and_times_steps_in_which_all_sequences_take_part(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, FULL_SHAPES["tiny"], "q8_0", 1)
    task = {"model": str(path), "threads": 1}
    loaded, ready = run_worker({**task, "hold": True})
    assert loaded["load_s"] > 0
    assert ready == {"ready": True}
    batches = {"batches": [1, 3], "prompt_tokens": 8, "new_tokens": 4, "seed": 0}
    _, *lines = run_worker({**task, **batches})
    assert [line["batch"] for line in lines] == [1, 3]
    assert all(0 < line["python_s"] < line["decode_s"] for line in lines)
