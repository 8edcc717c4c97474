"""Predicted against measured speed of the automatic fit, on random models of real shapes cut to a few layers.

    python -m benchmarks.fit_accuracy --out figures.json

Each model is written, predicted as `twofold fit` does, then measured by `twofold bench`. The machine must be idle: the
error at the end of each line is |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from twofold.blocks import ops
from twofold.fit.speed import cpu_speed, measure_rates
from twofold.models.model_files import open_model_files

from benchmarks.peers.engines import TwofoldEngine, Workload
from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.shapes import FULL_SHAPES

SHAPES: Final = {"qwen3-30b-a3b": 6, "qwen3-235b-a22b": 2, "glm-4.5-air": 3}
"""Layers that are kept."""
FORMATS: Final = ("q4_k", "q8_0")
_VOCABULARY: Final = 32_768


def compare(name: str, layers: int, format_name: str, folder: Path, work: Workload) -> dict[str, Any]:
    """Predicted and measured tokens per second of one model."""
    shape = replace(FULL_SHAPES[name], layers=layers, vocab=_VOCABULARY)
    path = folder / f"{name}-{format_name}.gguf"
    write_model(path, shape, format_name)
    try:
        files, pool = open_model_files(path), ops.ThreadPool(work.threads)
        rates = measure_rates(files, pool)
        prefill = cpu_speed(files, rates, work.prompt_tokens).prefill
        decode = cpu_speed(files, rates, work.prompt_tokens + work.new_tokens // 2).decode
        measured = TwofoldEngine().measure(path, work)
    finally:
        path.unlink()
    found = {
        "decode": (decode, measured.tg),
        "prefill": (prefill, measured.pp),
    }
    return {"shape": name, "layers": layers, "format": format_name} | {
        what: {"predicted": predicted, "measured": real, "error": abs(predicted / real - 1)}
        for what, (predicted, real) in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="shapes, with commas between them")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, with commas between them")
    parser.add_argument("--folder", default=None, help="directory for the models, one at a time")
    args = parser.parse_args()
    work = Workload(
        prompt_tokens=512, new_tokens=32, repeats=3, threads=ops.ThreadPool(0).num_threads, seed=1
    )
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in args.shapes.split(","):
            for format_name in args.formats.split(","):
                rows.append(compare(name, SHAPES[name], format_name, Path(folder), work))
                print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
