"""`twofold calibrate`: measure this machine's CPU on a model's experts and keep the figures."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from twofold.config import EngineConfig
from twofold.errors import ConfigError

if TYPE_CHECKING:
    from twofold.experts.calibration import Calibration

_BAR_CHARS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="", help="model whose experts are measured (default: the bundled one)"
    )
    parser.add_argument(
        "--base", default="rtx4090-pcie4", help="profile that lends the accelerator's figures"
    )
    parser.add_argument(
        "--output", metavar="FILE.json", help="where to keep the profile (default: this user's settings)"
    )
    parser.add_argument(
        "--cpu-threads", type=int, default=0, help="threads to measure with; 0: one per physical core"
    )
    parser.add_argument(
        "--repeats", type=int, default=15, help="how often each figure is measured (default: 15)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print, store. ConfigError when the profile cannot be written; nothing is half-written."""
    from twofold.bundled import bundled_model_path
    from twofold.experts.calibration import calibrate, to_profile
    from twofold.experts.moe import MoeShape
    from twofold.experts.profiles import load_profile, local_profile_path
    from twofold.model.model_files import open_model_files

    EngineConfig(cpu_threads=args.cpu_threads)  # refuses what is out of range
    if not 1 <= args.repeats <= 1000:
        raise ConfigError(f"--repeats was given {args.repeats}; it takes 1 to 1000")
    base = load_profile(args.base)
    files = open_model_files(args.model or bundled_model_path())
    config = files.config
    shape = MoeShape(
        len(config.moe_layers),
        config.num_experts,
        config.top_k,
        config.hidden_size,
        config.moe_intermediate_size,
        files.expert_formats(),
    )
    output = Path(args.output) if args.output else local_profile_path()
    progress = _show if sys.stderr.isatty() else None
    calibration = calibrate(shape, args.cpu_threads, repeats=args.repeats, progress=progress)
    if progress is not None:
        print(end="\r\x1b[K", file=sys.stderr)
    profile = to_profile(calibration, base)
    _write(output, profile.to_json())
    if args.json:
        print(json.dumps(_figures(calibration) | {"profile": str(output)}))
    else:
        print(format_calibration(calibration))
        print(f"stored in {output}; used from now on for predictions on this machine")
    return 0


def format_calibration(calibration: Calibration) -> str:
    """The fit as a table with residuals and a plot, for a terminal."""
    curve = calibration.curve
    lines = [
        f"CPU experts, {curve.format}, {curve.hidden} x {curve.intermediate}, {curve.threads} threads; "
        f"a layer costs {curve.layer_us:.1f} us beside its experts",
        f"{'tokens':>7} {'us/expert':>10} {'GFLOP/s':>8} {'residual':>9}",
    ]
    longest = max(us for _, us in curve.points)
    flops = 6.0 * curve.hidden * curve.intermediate
    for tokens, us in curve.points:
        residuals = [s.error for s in calibration.grid if s.loads[0] == tokens]
        bar = "#" * max(1, round(_BAR_CHARS * us / longest))
        lines.append(
            f"{tokens:>7} {us:>10.2f} {flops * tokens / us / 1e3:>8.1f} {max(residuals):>8.1%}  {bar}"
        )
    threads = ", ".join(f"{count}: {us:.1f} us" for count, us in calibration.thread_us.items())
    lines += [
        f"a decode layer by threads: {threads}",
        f"slow-down while {calibration.copy_gbps:.1f} GB/s are copied beside it: {calibration.contention:.1%}",
        f"error on {len(calibration.unseen)} layers of mixed loads that the fit never saw: median "
        f"{calibration.median_error:.1%}, worst {max(s.error for s in calibration.unseen):.1%}",
    ]
    return "\n".join(lines)


def _figures(calibration: Calibration) -> dict[str, object]:
    curve = calibration.curve
    return {
        "format": curve.format,
        "hidden": curve.hidden,
        "intermediate": curve.intermediate,
        "threads": curve.threads,
        "layer_us": curve.layer_us,
        "points": [{"tokens": tokens, "us": us} for tokens, us in curve.points],
        "thread_us": {str(count): us for count, us in calibration.thread_us.items()},
        "contention": calibration.contention,
        "copy_gbps": calibration.copy_gbps,
        "median_error": calibration.median_error,
        "unseen": [
            {"tokens": list(s.loads), "measured_us": s.measured_us, "predicted_us": s.predicted_us}
            for s in calibration.unseen
        ],
    }


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written to {path}: {error.strerror}; name another --output"
        ) from error


def _show(what: str, share: float) -> None:
    filled = round(_BAR_CHARS * share)
    print(
        end=f"\r\x1b[Kcalibrating [{'#' * filled}{' ' * (_BAR_CHARS - filled)}] {what}",
        file=sys.stderr,
        flush=True,
    )
