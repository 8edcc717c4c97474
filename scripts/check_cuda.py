"""Compile the CUDA kernels with `-Xptxas -v` and list each kernel's registers, shared memory and spills.

    python scripts/check_cuda.py [--arch 80,86,89,90,120] [--json FILE] [SOURCE.cu ...]

Exit status 1 if a kernel spills a register or does not compile, 2 without nvcc. Needs no GPU and no driver.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = "80,86,89,90,120"


@dataclass(frozen=True)
class Kernel:
    """What ptxas reports of one kernel."""

    source: str
    arch: str
    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def find_nvcc() -> str | None:
    """nvcc where the build looks for it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next(
        (str(path) for home in homes if home and (path := Path(home) / "bin/nvcc").exists()), None
    )


def parse_report(report: str, source: str) -> list[Kernel]:
    """The kernels in what `nvcc -Xptxas -v` prints."""
    kernels = []
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    for found in pattern.finditer(report):
        spilled = int(found["stores"]) + int(found["loads"])
        kernels.append(
            Kernel(
                source, found["arch"], found["name"], int(found["registers"]), int(found["stack"]), spilled
            )
        )
    return kernels


def compile_source(nvcc: str, source: Path, archs: Sequence[str], folder: Path) -> tuple[str, list[Kernel]]:
    """(error text or "", kernels) of one file for all architectures."""
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", "-Xcompiler=-fPIC"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    command += [f"-I{ROOT / part}" for part in ("kernels/include", "kernels/cuda", "kernels/cuda/gpu")]
    command += ["-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    return (report if done.returncode else ""), parse_report(report, source.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--arch", default=ARCHITECTURES, help=f"comma-separated (default: {ARCHITECTURES})")
    parser.add_argument("--json", type=Path, help="write the table here")
    options = parser.parse_args(argv)
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc is neither on PATH nor under CUDA_HOME; install the CUDA toolkit", file=sys.stderr)
        return 2
    sources = options.sources or sorted((ROOT / "kernels/cuda").glob("*.cu"))
    kernels: list[Kernel] = []
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        archs = options.arch.split(",")
        for error, found in pool.map(lambda s: compile_source(nvcc, s, archs, Path(folder)), sources):
            errors += [error] if error else []
            kernels += found
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))
    for kernel in sorted(kernels, key=lambda k: (-k.spill_bytes, -k.registers)):
        print(
            f"{kernel.arch:7} {kernel.registers:3} registers {kernel.stack_bytes:4} B stack "
            f"{kernel.spill_bytes:4} B spilled  {kernel.name}"
        )
    for error in errors:
        print(error, file=sys.stderr)
    spilling = [kernel.name for kernel in kernels if kernel.spill_bytes]
    print(f"{len(kernels)} kernels, {len(spilling)} with spills, {len(errors)} files that do not compile")
    return 1 if spilling or errors or not kernels else 0


if __name__ == "__main__":
    raise SystemExit(main())
