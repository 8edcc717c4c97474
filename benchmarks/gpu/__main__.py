"""Twofold's speed on a GPU, beside the card's ceilings and other engines' rules, in ten minutes: `make bench-gpu`.

    python -m benchmarks.gpu --estimate
    python -m benchmarks.gpu [--no-build] [--dry-run] [--only PATTERN] [--trace FILE] [--json FILE]

Ceilings (copy bandwidth, torch's product, the link) are measured in the same run; what is compared takes turns on the
same routing, in rounds. Each entry of the JSON has figures, what is expected of them and whether it holds. Checks that
did not fit into --budget-s are listed as not run: give --only for them.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.report import ROOT, Check, Named, Run, build

if TYPE_CHECKING:
    from benchmarks.gpu.estimate import Case
    from benchmarks.gpu.machine import Machine

QWEN, GPT_OSS = "qwen3-30b-a3b", "gpt-oss-20b"
SHARES = (0.25, 0.1, 0.5, 0.75)


def kernels(name: str, *arguments: Any) -> Check:
    """A measurement of gpu.kernel_speed; imported when it runs, because listing needs no torch."""

    def check(machine: Machine) -> dict[str, Any]:
        from benchmarks.gpu import kernel_speed

        found: Callable[..., dict[str, Any]] = getattr(kernel_speed, name)
        return found(machine, *arguments)

    return check


def engine(name: str, shape: str, *arguments: Any) -> Check:
    """The same of gpu.engine_speed."""

    def check(machine: Machine) -> dict[str, Any]:
        from benchmarks.gpu import engine_speed, models

        found: Callable[..., dict[str, Any]] = getattr(engine_speed, name)
        return found(machine, models.SHAPES[shape], *arguments)

    return check


def expert_cases() -> list[Case]:
    """(kind, shape, format, tokens) of what is measured of the expert kernels alone."""
    decode: list[Case] = [
        ("decode", shape, format, tokens)
        for shape, formats in ((QWEN, ("bf16", "q8_0", "q4_0", "fp8", "q4_k")), (GPT_OSS, ("bf16", "q4_0")))
        for format in formats
        for tokens in (1, 8, 32)
    ]
    return decode + [
        ("prefill", QWEN, format, tokens) for format in ("bf16", "q8_0") for tokens in (512, 4096)
    ]


def checks() -> list[Named]:
    """(name, what measures it), what the issue asks for before what explains it."""
    ceilings: list[Named] = [
        ("copy bandwidth", kernels("copy_bandwidth")),
        ("torch's bf16 product", kernels("torch_product")),
        ("handshake per layer", kernels("handshake")),
    ]
    experts: list[Named] = [
        (f"{kind} {shape} {format} {tokens} tokens", kernels(kind, shape, format, tokens))
        for kind, shape, format, tokens in expert_cases()
    ]
    return [
        *ceilings,
        *experts,
        *whole(QWEN, 0.25),
        *((f"rules at {share:.0%} slots, {QWEN}", engine("rules_at", QWEN, share)) for share in SHARES),
        (f"calibration, {GPT_OSS}", engine("calibration", GPT_OSS)),
        *((f"rules at {share:.0%} slots, {GPT_OSS}", engine("rules_at", GPT_OSS, share)) for share in SHARES),
        (f"predicted against measured, {GPT_OSS}", engine("predictions", GPT_OSS, 0.25)),
        (f"graph against eager, {GPT_OSS}", engine("graph_against_eager", GPT_OSS, 0.25)),
    ]


def whole(shape: str, share: float) -> list[Named]:
    """The engine with one shape; calibration comes first, because the others use its figures."""
    return [
        (f"calibration, {shape}", engine("calibration", shape)),
        (f"uploads beside the link, {shape}", engine("uploads", shape)),
        (f"policy per layer, {shape}", engine("policy_cost", shape)),
        (f"graph against eager, {shape}", engine("graph_against_eager", shape, share)),
        (f"predicted against measured, {shape}", engine("predictions", shape, share)),
        (f"telemetry's cost, {shape}", engine("telemetry_cost", shape, share)),
        (f"launching a step, {shape}", engine("launch_share", shape)),
        (f"a layer's experts on the CPU, {shape}", engine("cpu_beside", shape)),
    ]


def main(argv: list[str] | None = None) -> int:
    """Build, measure everything, leave the JSON. Exit status 1 if a measurement failed, 3 where there is no device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--no-build", action="store_true", help="use what is built beside the sources")
    parser.add_argument(
        "--dry-run", action="store_true", help="build nothing, measure nothing, list everything"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="print roofline estimates beside the bounds; needs no GPU"
    )
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names that match, e.g. 'decode*'")
    parser.add_argument(
        "--budget-s", type=float, default=570.0, help="nothing begins after so many seconds (default: 570)"
    )
    parser.add_argument(
        "--trace", type=Path, help="recorded routing (npz with ids, probs, offsets); default: drawn"
    )
    parser.add_argument(
        "--folder", type=Path, help="where models of random weights are written (default: temporary)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build/gpu-bench.json", help="where figures go")
    options = parser.parse_args(argv)
    if options.estimate:
        sys.path.insert(0, str(ROOT / "engine"))
        from benchmarks.gpu.estimate import lines

        print("\n".join(lines(expert_cases())))
        return 0
    began = time.perf_counter()
    if not options.dry_run and not options.no_build:
        build()
    run = Run(
        options.json, build_seconds=time.perf_counter() - began, budget_s=options.budget_s,
        dry=options.dry_run, trace=options.trace, folder=options.folder,
    )  # fmt: skip
    states = [
        run.check(name, check)["state"] for name, check in checks() if fnmatch.fnmatch(name, options.only)
    ]
    run.close()
    print(f"written to {options.json}")
    if run.machine is None:
        print(f"nothing was run: {run.why_nothing_runs}", file=sys.stderr)
        return 0 if options.dry_run else 3
    return int("failed" in states or "error" in states)


if __name__ == "__main__":
    raise SystemExit(main())
