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

from benchmarks.peers.engines import LlamaEngine, PeerError, TwofoldEngine, Workload, last_json_lines
from benchmarks.peers.gguf_model import file_name, write_model
from benchmarks.peers.rounds import alternate
from benchmarks.targets.lines import Line, Settings, at_least, at_most, not_measured

# ÷ llama.cpp, by test and format.
DECODE: Final = {"q8_0": 1.15, "q4_0": 1.05, "bf16": 1.0}
PREFILL: Final = {"q8_0": 4.0, "q4_0": 3.0, "bf16": 2.5}
_SPIN_LIMIT_S: Final = 900.0
_BATCHED: Final = Path(__file__).parents[1] / "peers" / "workers" / "batched_worker.py"

# Exits after a timeout or when its parent process dies.
_SPIN: Final = (
    "import os, sys, time\n"
    "parent, until = os.getppid(), time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < until and os.getppid() == parent:\n"
    "    for _ in range(1_000_000): pass\n"
)


def workload(settings: Settings) -> Workload:
    return Workload(
        settings.prompt_tokens, settings.new_tokens, 3, settings.threads, settings.seed, settings.shape.vocab
    )


@contextmanager
def random_model(settings: Settings, format_name: str) -> Iterator[Path]:
    """The model's file: from the cache, or made now and deleted afterwards unless it is to be kept."""
    path = settings.cache / file_name(settings.shape, format_name, settings.seed)
    made = not path.exists()
    if made:
        settings.say(f"writing {path.name}")
        write_model(path, settings.shape, format_name, settings.seed)
    try:
        yield path
    finally:
        if made and not settings.keep_models:
            path.unlink(missing_ok=True)


def beside_llama(settings: Settings) -> list[Line]:
    """Decode and prefill of each format as a multiple of llama.cpp's, in turn on the same file."""
    lines = []
    for format_name in settings.formats:
        engines = [TwofoldEngine(settings.python), LlamaEngine(settings.llama_python)]
        with random_model(settings, format_name) as path:
            outcome = alternate(engines, path, workload(settings), format_name, settings.rounds, settings.say)
        speeds = {(s.engine, s.test[:2]): s.median for s in outcome.series}
        for test, what, wanted in (("tg", "decode", DECODE), ("pp", "prefill", PREFILL)):
            name = f"{what} {format_name} ÷ llama.cpp"
            ours, theirs = speeds.get(("twofold", test)), speeds.get(("llama.cpp", test))
            why = "; ".join(outcome.left_out.values())
            note = why or f"{ours:.1f} against {theirs:.1f} tokens/s"
            ratio = ours / theirs if ours and theirs else None
            lines.append(at_least("llama", name, wanted.get(format_name, 1.0), ratio, "×", note))
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
    work = workload(settings)
    engine = TwofoldEngine(settings.python)
    quiet, busy = [], []
    target = f"decode {format_name} beside one busy process per core"
    try:
        with random_model(settings, format_name) as path:
            for turn in range(settings.rounds):
                quiet.append(engine.measure(path, work).tg)
                with busy_cores(settings.threads):
                    busy.append(engine.measure(path, work).tg)
                settings.say(
                    f"busy cores, round {turn + 1}: {quiet[-1]:.1f} quiet, {busy[-1]:.1f} tokens/s beside others"
                )
    except PeerError as error:
        return [not_measured("busy", target, str(error))]
    share = statistics.median(busy) / statistics.median(quiet)
    note = f"{statistics.median(busy):.1f} of {statistics.median(quiet):.1f} tokens/s"
    return [at_least("busy", target, 35, 100 * share, "%", note)]


def python_share(settings: Settings) -> list[Line]:
    """Python outside native calls: one sequence and 16 of the large model, 1 to 64 of the bundled one."""
    format_name = settings.formats[0]
    with random_model(settings, format_name) as path:
        several = batched_share(settings, path, f"{settings.shape.name} in {format_name}", (16,), 3)
    bundled = batched_share(settings, bundled_model_path(), "the bundled model", (1, 16, 64), 10)
    return [single_share(settings), *several, *bundled]


def single_share(settings: Settings) -> Line:
    """Python outside native calls as a share of a decode step of one sequence, as `twofold bench` says it."""
    format_name = settings.formats[0]
    target = f"Python outside native calls, decode {format_name}"
    command_of = [
        settings.python, "-m", "twofold.tools.cli", "bench", "--json", "--profile", "--accelerator", "none",
        "--no-compare-transformers", "--prompt-tokens", str(settings.prompt_tokens),
        "--new-tokens", str(settings.new_tokens + 1), "--cpu-threads", str(settings.threads),
        "--random-prompt", str(settings.seed),
        "--max-model-len", str(settings.prompt_tokens + settings.new_tokens + 64),
    ]  # fmt: skip
    try:
        with random_model(settings, format_name) as path:
            lines = last_json_lines([*command_of, str(path)], "twofold bench --profile", "make build")
        decode = lines[-1]["profile"]["decode"]
        share, step_us = float(decode["python_share"]), float(decode["step_us"])
        picking = float(decode["parts_us"].get("sampler", 0.0)) / step_us
    except (PeerError, IndexError, KeyError, TypeError) as error:
        return not_measured("python", target, f"twofold bench --profile: {error}")
    note = f"of {step_us / 1e3:.2f} ms; picking the token takes another {100 * picking:.1f} %"
    return at_most("python", target, 3, 100 * share, "%", note)


def batched_share(
    settings: Settings, model: Path, name: str, batches: tuple[int, ...], most: float
) -> list[Line]:
    """The share in steps in which each of several sequences gets a token, the median of three runs."""
    task = {"model": str(model), "batches": list(batches) * 3, "prompt_tokens": 32, "new_tokens": 32}
    task |= {"threads": settings.threads, "seed": settings.seed}
    targets = {batch: f"Python outside native calls, {batch} sequences, {name}" for batch in batches}
    try:
        runs = last_json_lines(
            [settings.python, str(_BATCHED), json.dumps(task)], "the batched worker", "make build"
        )
        shares = {
            batch: sorted(
                (run["python_s"] / run["decode_s"], run["decode_s"]) for run in runs if run["batch"] == batch
            )
            for batch in batches
        }
        found = {batch: shares[batch][len(shares[batch]) // 2] for batch in batches}
    except (PeerError, IndexError, KeyError, TypeError) as error:
        return [not_measured("python", target, str(error)) for target in targets.values()]
    return [
        at_most("python", targets[batch], most, 100 * share, "%", f"of {1e3 * decode_s / 32:.2f} ms")
        for batch, (share, decode_s) in found.items()
    ]
