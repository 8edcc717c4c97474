"""Everything about CUDA that needs a GPU to be checked, in one run of under ten minutes: `make test-gpu`.

    python scripts/gpu_test.py [--no-build] [--dry-run] [--only PATTERN] [--sanitize] [--trace FILE] [--json FILE]

Needs nvcc, a C++ compiler, cmake, ninja, pybind11 and torch with CUDA; builds from source for the GPU at hand. Every
check is listed in the JSON with its state ("passed", "failed", "error", "not run"), its figures, what was expected of
them and its seconds. Exit status 1 if one failed, 3 where there is no device. `--dry-run` goes as far as it can without
one. `--sanitize` runs a reduced list under compute-sanitizer instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_run

if TYPE_CHECKING:
    from gpu.machine import Machine

QWEN, GPT_OSS = "qwen3-30b-a3b", "gpt-oss-20b"
FORMATS = ("f32", "f16", "bf16", "fp8", "q8_0", "q4_0", "int8", "int4", "q4_k", "q5_k", "q6_k")


def kernels(name: str, *arguments: Any) -> gpu_run.Check:
    """A check of gpu.kernel_checks; imported when it runs, because listing needs no torch."""

    def check(machine: Machine) -> dict[str, Any]:
        from gpu import kernel_checks

        found: Callable[..., dict[str, Any]] = getattr(kernel_checks, name)
        return found(machine, *arguments)

    return check


def engine(name: str, shape: str | None = None, *arguments: Any) -> gpu_run.Check:
    """The same of gpu.engine_checks."""

    def check(machine: Machine) -> dict[str, Any]:
        from gpu import engine_checks, models

        found: Callable[..., dict[str, Any]] = getattr(engine_checks, name)
        return found(machine, *((models.SHAPES[shape],) if shape else ()), *arguments)

    return check


def checks(formats: tuple[str, ...] = FORMATS) -> list[gpu_run.Named]:
    """(name, what runs it) of every check, in order: small things before what stands on them."""
    return [
        *((f"decode experts, {name}", kernels("decode_experts", name)) for name in formats),
        *((f"prefill experts, {name}", kernels("prefill_experts", name)) for name in formats if name != "f32"),
        ("routing", kernels("routing")),
        ("rotation, KV store and decode attention", kernels("attention")),
        ("hand-over probe", kernels("hand_over_probe")),
        ("hits on the GPU and misses by the mailbox, eager", kernels("hybrid", False)),
        ("hits on the GPU and misses by the mailbox, one graph", kernels("hybrid", True)),
        ("a step that nobody serves is given up", kernels("watchdog")),
        *(
            (f"logits for every placement, {QWEN}, batch of {batch}", engine("logits_for_every_placement", QWEN, batch))
            for batch in (1, 4)
        ),
        ("logits against the engine without a GPU", engine("logits_against_the_cpu_engine")),
        *(
            (f"placement frozen, two runs bit-identical, {mode}", engine("frozen_placement", None, mode))
            for mode in ("graph", "eager", "placed")
        ),
        ("a lost step costs no request", engine("lost_step")),
        *(
            (f"every placement, upload and eviction is told, {mode}", engine("every_event_is_told", None, mode))
            for mode in ("graph", "placed")
        ),
        (f"logits for every placement, {GPT_OSS}, batch of 1", engine("logits_for_every_placement", GPT_OSS, 1)),
    ]  # fmt: skip


SANITIZED = (
    "decode experts, bf16", "decode experts, q8_0", "decode experts, q4_0", "decode experts, q4_k",
    "prefill experts, bf16", "prefill experts, q8_0", "routing", "rotation, KV store and decode attention",
    "hits on the GPU and misses by the mailbox, eager",
)  # fmt: skip


def sanitize(options: argparse.Namespace) -> int:
    """This script again, with a reduced list, under compute-sanitizer. Exit status 9 where that found something."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("compute-sanitizer was not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 3
    if not options.no_build:
        gpu_run.build()
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--no-build"]
    command += ["--sanitized-part", "--budget-s", str(options.budget_s), "--json", str(options.json)]
    done = subprocess.run(command, check=False)
    print(
        "compute-sanitizer: clean" if done.returncode == 0 else f"compute-sanitizer: status {done.returncode}"
    )
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    gpu_run.add_options(parser, "gpu-test.json")
    parser.add_argument("--sanitize", action="store_true", help="run a reduced list under compute-sanitizer")
    parser.add_argument("--sanitized-part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.sanitize:
        return sanitize(options)
    listed = checks()
    if options.sanitized_part:
        listed = [pair for pair in listed if pair[0] in SANITIZED]
    return gpu_run.run(options, listed)


if __name__ == "__main__":
    raise SystemExit(main())
