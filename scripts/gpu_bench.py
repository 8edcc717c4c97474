"""Twofold's speed on a GPU, beside the card's ceilings and other engines' rules, in ten minutes: `make bench-gpu`.

    python scripts/gpu_bench.py [--no-build] [--dry-run] [--only PATTERN] [--trace FILE] [--json FILE]

Ceilings (copy bandwidth, torch's product, the link) are measured in the same run; what is compared takes turns on the
same routing, in rounds. Each entry of the JSON has figures, what is expected of them and whether it holds. Checks that
did not fit into --budget-s are listed as not run: give --only for them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_run

if TYPE_CHECKING:
    from gpu.machine import Machine

QWEN, GPT_OSS = "qwen3-30b-a3b", "gpt-oss-20b"
SHARES = (0.25, 0.1, 0.5, 0.75)


def kernels(name: str, *arguments: Any) -> gpu_run.Check:
    """A measurement of gpu.kernel_speed; imported when it runs, because listing needs no torch."""

    def check(machine: Machine) -> dict[str, Any]:
        from gpu import kernel_speed

        found: Callable[..., dict[str, Any]] = getattr(kernel_speed, name)
        return found(machine, *arguments)

    return check


def engine(name: str, shape: str, *arguments: Any) -> gpu_run.Check:
    """The same of gpu.engine_speed."""

    def check(machine: Machine) -> dict[str, Any]:
        from gpu import engine_speed, models

        found: Callable[..., dict[str, Any]] = getattr(engine_speed, name)
        return found(machine, models.SHAPES[shape], *arguments)

    return check


def checks() -> list[gpu_run.Named]:
    """(name, what measures it), what the issue asks for before what explains it."""
    ceilings: list[gpu_run.Named] = [
        ("copy bandwidth", kernels("copy_bandwidth")),
        ("torch's bf16 product", kernels("torch_product")),
        ("hand-over per layer", kernels("hand_over")),
    ]
    experts: list[gpu_run.Named] = [
        (f"decode {shape} {format} {tokens} tokens", kernels("decode", shape, format, tokens))
        for shape, formats in ((QWEN, ("bf16", "q8_0", "q4_0", "fp8", "q4_k")), (GPT_OSS, ("bf16", "q4_0")))
        for format in formats
        for tokens in (1, 8, 32)
    ]
    experts += [
        (f"prefill {QWEN} {format} {tokens} tokens", kernels("prefill", QWEN, format, tokens))
        for format in ("bf16", "q8_0")
        for tokens in (512, 4096)
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


def whole(shape: str, share: float) -> list[gpu_run.Named]:
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
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    gpu_run.add_options(parser, "gpu-bench.json")
    return gpu_run.run(parser.parse_args(argv), checks())


if __name__ == "__main__":
    raise SystemExit(main())
