"""Predicted against measured speed of the automatic fit, on random models of real shapes cut to a few layers.

    python -m benchmarks.fit_accuracy [--folder DIR] [--out figures.json] [--cpu-time]

Each model is written, predicted as `twofold fit` does, then measured by `twofold bench`. `--folder` keeps the models
for the next time, and `--write-only` ends there. The machine must be idle: the errors are predicted ÷ measured - 1, the
median of the rounds.
On a busy machine, `--cpu-time` measures one thread's CPU time instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.fit.speed import measured_speed
from twofold.models.model_files import open_model_files

from benchmarks.peers.engines import Round, TwofoldEngine, Workload
from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.shapes import FULL_SHAPES

SHAPES: Final = {"qwen3-30b-a3b": 4, "gpt-oss-120b": 1, "glm-4.5-air": 2}
"""Layers that are kept."""
FORMATS: Final = ("q4_k", "q8_0")
_VOCABULARY: Final = 32_768


def written(name: str, format_name: str, folder: Path) -> Path:
    """The model's file, written unless it is there."""
    path = folder / f"{name}-{SHAPES[name]}-{format_name}.gguf"
    if not path.exists():
        write_model(path, replace(FULL_SHAPES[name], layers=SHAPES[name], vocab=_VOCABULARY), format_name)
    return path


def by_cpu_time(path: Path, work: Workload) -> Round:
    """Tokens per second of this process's CPU time, the median of the repeats. For one thread: several would wait for
    each other on the clock."""
    config = EngineConfig(
        model=str(path),
        accelerator="none",
        cpu_threads=work.threads,
        enable_prefix_caching=False,
        max_num_batched_tokens=max(512, work.prompt_tokens),
        max_model_len=work.prompt_tokens + work.new_tokens + 64,
        max_num_seqs=1,
    )
    engine = Engine.load(config)
    pp, tg = [], []
    for _ in range(1 + work.repeats):  # the first one warms up
        times: list[float] = []
        began = time.process_time()
        params = SamplingParams(max_tokens=work.new_tokens + 1, temperature=0.0, ignore_eos=True)
        engine.generate(work.prompt, params, lambda _, at=times: at.append(time.process_time()))
        pp.append(work.prompt_tokens / (times[0] - began))
        tg.append((len(times) - 1) / (times[-1] - times[0]))
    engine.close()
    return Round(statistics.median(pp[1:]), statistics.median(tg[1:]))


def compare(
    path: Path, work: Workload, measure: Callable[[Path, Workload], Round], clock: Callable[[], float] | None
) -> dict[str, dict[str, float]]:
    """Predicted and measured tokens per second of one model."""
    files, pool = open_model_files(path), ops.ThreadPool(work.threads)
    cache_dtype = files.config.cache_dtype("auto")
    context = work.prompt_tokens + work.new_tokens // 2
    began = time.monotonic()
    prefill = measured_speed(files, pool, work.prompt_tokens, cache_dtype, clock=clock).prefill
    took_s = time.monotonic() - began
    decode = measured_speed(files, pool, context, cache_dtype, clock=clock).decode
    measured = measure(path, work)
    found = {"decode": (decode, measured.tg), "prefill": (prefill, measured.pp)}
    return {
        what: {"predicted": predicted, "measured": real, "prediction_s": took_s}
        for what, (predicted, real) in found.items()
    }


def medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Each figure's median; `error` is that of the rounds' own errors, as memory is faster in some rounds."""
    found = {
        what: {name: statistics.median(each[what][name] for each in rounds) for name in rounds[0][what]}
        for what in rounds[0]
    }
    for what, figures in found.items():
        figures["error"] = statistics.median(
            each[what]["predicted"] / each[what]["measured"] - 1 for each in rounds
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="shapes, with commas between them")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, with commas between them")
    parser.add_argument("--folder", type=Path, help="directory that keeps the models (default: none is kept)")
    parser.add_argument("--rounds", type=int, default=3, help="of prediction and measurement (default: 3)")
    parser.add_argument("--write-only", action="store_true", help="write the models and end")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure one thread's CPU time (busy machine)"
    )
    args = parser.parse_args()
    threads = 1 if args.cpu_time else ops.ThreadPool(0).num_threads
    measure = by_cpu_time if args.cpu_time else TwofoldEngine().measure
    clock = time.process_time if args.cpu_time else None
    work = Workload(prompt_tokens=512, new_tokens=32, repeats=3, threads=threads, seed=1)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as own:
        for name in args.shapes.split(","):
            for format_name in args.formats.split(","):
                path = written(name, format_name, args.folder or Path(own))
                if args.write_only:
                    continue
                rounds = [compare(path, work, measure, clock) for _ in range(args.rounds)]
                found = figures[f"{name}, {SHAPES[name]} layers, {format_name}"] = medians(rounds)
                for what, each in found.items():
                    print(
                        f"{name:>16} {format_name:>5} {what:>8}: {each['predicted']:8.1f} predicted, "
                        f"{each['measured']:8.1f} measured tokens/s, {each['error']:+.1%}",
                        flush=True,
                    )
                if args.folder is None:
                    path.unlink()
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
