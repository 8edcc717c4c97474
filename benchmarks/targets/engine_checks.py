"""Targets measured on whole models: beside llama.cpp, beside busy neighbours, and where the time of a step goes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from twofold.models.bundled import bundled_model_path

from benchmarks.peers.engines import OURS, WORKERS, LlamaEngine, TwofoldEngine, alternate, json_lines
from benchmarks.scenario import BenchmarkError, say
from benchmarks.targets.lines import Line, Settings, at_least, at_most, not_measured

# ÷ llama.cpp, by test and format.
DECODE: Final = {"q8_0": 1.15, "q4_0": 1.05, "bf16": 1.0}
PREFILL: Final = {"q8_0": 4.0, "q4_0": 3.0, "bf16": 2.5}
_SPIN_LIMIT_S: Final = 900.0
WORKER: Final = str(WORKERS / "engine_worker.py")

# Exits after a timeout or when its parent process dies.
_SPIN: Final = (
    "import os, sys, time\n"
    "parent, until = os.getppid(), time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < until and os.getppid() == parent:\n"
    "    for _ in range(1_000_000): pass\n"
)


def beside_llama(settings: Settings) -> list[Line]:
    """Decode and prefill of each format as a multiple of llama.cpp's, in turn on the same file."""
    lines = []
    for format_name in settings.formats:
        engines = [TwofoldEngine(settings.python), LlamaEngine(settings.llama_python)]
        with settings.random_model(format_name) as path:
            outcome = alternate(engines, path, settings.workload, format_name, settings.rounds)
        why = "; ".join(outcome.left_out.values())
        for test, what, wanted in (("tg", "decode", DECODE), ("pp", "prefill", PREFILL)):
            target = at_least("llama", f"{what} {format_name} ÷ llama.cpp", wanted.get(format_name, 1.0), "×")
            ours, theirs = outcome.samples(OURS, test), outcome.samples("llama.cpp", test)
            if not ours or not theirs:
                lines.append(target.line(None, why))
                continue
            mine, peer = statistics.median(ours), statistics.median(theirs)
            lines.append(target.line(mine / peer, why or f"{mine:.1f} against {peer:.1f} tokens/s"))
    return lines


@contextmanager
def busy_cores(count: int) -> Iterator[list[int]]:
    """`count` processes that compute without end; gives their ids and ends them, and nothing else, afterwards."""
    spinners = [
        subprocess.Popen([sys.executable, "-c", _SPIN, str(_SPIN_LIMIT_S)], stdin=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield [spinner.pid for spinner in spinners]
    finally:
        for spinner in spinners:
            spinner.terminate()
        for spinner in spinners:
            spinner.wait()


def beside_busy_processes(settings: Settings) -> list[Line]:
    """Decoding with one busy process per core, as a share of the quiet speed; quiet and busy rounds in turn."""
    format_name = settings.formats[0]
    engine, work = TwofoldEngine(settings.python), settings.workload
    quiet, busy = [], []
    target = at_least("busy", f"decode {format_name} beside one busy process per core", 35, "%")
    try:
        with settings.random_model(format_name) as path:
            for turn in range(settings.rounds):
                quiet.append(engine.measure(path, work).tg)
                with busy_cores(settings.threads):
                    busy.append(engine.measure(path, work).tg)
                say(
                    f"busy cores, round {turn + 1}: {quiet[-1]:.1f} quiet, {busy[-1]:.1f} tokens/s beside others"
                )
    except BenchmarkError as error:
        return [not_measured("busy", target.what, str(error))]
    alone, beside = statistics.median(quiet), statistics.median(busy)
    return [target.line(100 * beside / alone, f"{beside:.1f} of {alone:.1f} tokens/s")]


def python_share(settings: Settings) -> list[Line]:
    """Python outside native calls: one sequence and 16 of the large model, 1 to 64 of the bundled one."""
    format_name = settings.formats[0]
    with settings.random_model(format_name) as path:
        several = batched_share(settings, path, f"{settings.shape.name} in {format_name}", (16,), most=3)
    bundled = batched_share(settings, bundled_model_path(), "the bundled model", (1, 16, 64), most=10)
    return [single_share(settings), *several, *bundled]


def single_share(settings: Settings) -> Line:
    """Python outside native calls as a share of a decode step of one sequence, as `twofold bench` says it."""
    format_name = settings.formats[0]
    target = at_most("python", f"Python outside native calls, decode {format_name}", 3, "%")
    command = [
        settings.python, "-m", "twofold.tools.cli", "bench", "--json", "--profile", "--accelerator", "none",
        "--no-compare-transformers", "--prompt-tokens", str(settings.prompt_tokens),
        "--new-tokens", str(settings.new_tokens + 1), "--cpu-threads", str(settings.threads),
        "--random-prompt", str(settings.seed),
        "--max-model-len", str(settings.prompt_tokens + settings.new_tokens + 64),
    ]  # fmt: skip
    try:
        with settings.random_model(format_name) as path:
            lines = json_lines([*command, str(path)], "twofold bench --profile", "make build")
        decode = lines[-1]["profile"]["decode"]
        share, step_us = float(decode["python_share"]), float(decode["step_us"])
        picking = float(decode["parts_us"].get("sampler", 0.0)) / step_us
    except (BenchmarkError, IndexError, KeyError, TypeError) as error:
        return not_measured("python", target.what, f"twofold bench --profile: {error}")
    note = f"of {step_us / 1e3:.2f} ms; picking the token takes another {100 * picking:.1f} %"
    return target.line(100 * share, note)


def batched_share(
    settings: Settings, model: Path, name: str, batches: tuple[int, ...], *, most: float
) -> list[Line]:
    """The share in steps in which each of several sequences gets a token, the median of three runs."""
    task = {"model": str(model), "batches": list(batches) * 3, "prompt_tokens": 32, "new_tokens": 32}
    task |= {"threads": settings.threads, "seed": settings.seed}
    targets = {
        batch: at_most("python", f"Python outside native calls, {batch} sequences, {name}", most, "%")
        for batch in batches
    }
    lines = []
    try:
        runs = json_lines([settings.python, WORKER, json.dumps(task)], "the engine's worker", "make build")
        for batch, target in targets.items():
            of_batch = [run for run in runs if run.get("batch") == batch]
            shares = sorted((run["python_s"] / run["decode_s"], run["decode_s"]) for run in of_batch)
            share, decode_s = shares[len(shares) // 2]
            lines.append(target.line(100 * share, f"of {1e3 * decode_s / 32:.2f} ms"))
    except (BenchmarkError, AttributeError, IndexError, KeyError, TypeError) as error:
        return [not_measured("python", target.what, str(error)) for target in targets.values()]
    return lines
