"""Predicted against measured speed of the automatic fit, on random models of real shapes cut to a few layers.

    python -m benchmarks.fit_accuracy [--folder DIR] [--out figures.json]

Each model is written, predicted as `twofold fit` does, then measured by `twofold bench`. `--folder` keeps the models
for the next time, and `--write-only` ends there. The machine must be idle: the errors are predicted ÷ measured - 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from twofold.blocks import ops
from twofold.fit.speed import measured_speed
from twofold.models.model_files import open_model_files

from benchmarks.peers.engines import TwofoldEngine, Workload
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


def compare(path: Path, work: Workload) -> dict[str, dict[str, float]]:
    """Predicted and measured tokens per second of one model."""
    files, pool = open_model_files(path), ops.ThreadPool(work.threads)
    cache_dtype = files.config.cache_dtype("auto")
    began = time.monotonic()
    prefill = measured_speed(files, pool, work.prompt_tokens, cache_dtype).prefill
    took_s = time.monotonic() - began
    decode = measured_speed(files, pool, work.prompt_tokens + work.new_tokens // 2, cache_dtype).decode
    measured = TwofoldEngine().measure(path, work)
    found = {"decode": (decode, measured.tg), "prefill": (prefill, measured.pp)}
    return {
        what: {
            "predicted": predicted,
            "measured": real,
            "error": predicted / real - 1,
            "prediction_s": took_s,
        }
        for what, (predicted, real) in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="shapes, with commas between them")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, with commas between them")
    parser.add_argument("--folder", type=Path, help="directory that keeps the models (default: none is kept)")
    parser.add_argument("--write-only", action="store_true", help="write the models and end")
    args = parser.parse_args()
    work = Workload(
        prompt_tokens=512, new_tokens=32, repeats=3, threads=ops.ThreadPool(0).num_threads, seed=1
    )
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as own:
        for name in args.shapes.split(","):
            for format_name in args.formats.split(","):
                path = written(name, format_name, args.folder or Path(own))
                if args.write_only:
                    continue
                found = figures[f"{name}, {SHAPES[name]} layers, {format_name}"] = compare(path, work)
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
