"""Compile the CUDA kernels for every architecture and compare the results with the table in the repository.

    python scripts/check_cuda.py [--arch 86,120] [--write] [--json FILE] [SOURCE.cu ...]

Exit status 1 if a kernel spills a register, does not compile or got worse than kernels/cuda/kernel_table.md says
(occupancy, stack, narrower accesses, more bank conflicts or sectors), 2 without nvcc. Needs no GPU and no driver.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuda_compiler import places  # noqa: E402

from scripts.cuda_table.sass import Compiled, Instance, codes_of, parse_report, widths_of  # noqa: E402
from scripts.cuda_table.table import (  # noqa: E402
    ARCHITECTURES,
    Launch,
    Table,
    compare,
    from_markdown,
    launches_of,
    parse_launches,
    tabulate,
    to_markdown,
)

TABLE = ROOT / "kernels/cuda/kernel_table.md"
TRAFFIC = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "dev/tests/simt/simt_traffic"
REMEDY = "mend it, or where it is meant run `make check-cuda WRITE=1` and say why in the commit"


def find_nvcc() -> str | None:
    """nvcc, searched in the same places as by the build."""
    return next(map(str, places()), None)


def version_of(nvcc: str) -> str:
    """nvcc's version, like 13.0.88."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else "unknown"


def compile_source(nvcc: str, source: Path, arch: int, folder: Path) -> tuple[str, list[Compiled]]:
    """(error text or "", kernels) of one file for one architecture."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    command = [
        nvcc,
        "-std=c++20",
        "-O3",
        "--expt-relaxed-constexpr",
        "-Xptxas=-v",
        f"-arch=sm_{arch}",
        "-cubin",
    ]
    command += [
        f"-I{ROOT / part}"
        for part in ("kernels/include", "kernels/device", "kernels/cuda", "kernels/cuda/gpu")
    ]
    done = subprocess.run(
        [*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False
    )
    report = done.stdout + done.stderr
    if done.returncode:
        return report, parse_report(report)
    codes = codes_of(cubin.read_bytes())
    return "", [
        dataclasses.replace(kernel, widths=widths_of(codes[kernel.name])) for kernel in parse_report(report)
    ]


def compile_all(nvcc: str, sources: Sequence[Path], archs: Sequence[int]) -> tuple[list[str], list[Compiled]]:
    """(error texts, kernels) of all files, as many compilers at once as there are cores."""
    errors: list[str] = []
    kernels: list[Compiled] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_source, nvcc, source, arch, Path(folder))
            for source in sources
            for arch in archs
        ]
        for error, found in (job.result() for job in jobs):
            errors += [error] if error else []
            kernels += found
    return errors, kernels


def recorded_launches(before: Table) -> dict[Instance, Launch]:
    """Launches recorded by the SIMT machine; those of the table if it is not built."""
    if not TRAFFIC.exists():
        print(f"{TRAFFIC} is not built (`make build`): bank conflicts and sectors are not compared")
        return launches_of(before)
    done = subprocess.run([str(TRAFFIC)], capture_output=True, text=True, check=True, timeout=900)
    return parse_launches(done.stdout)


def show(table: Table, archs: Sequence[int]) -> None:
    """One line per kernel."""
    print(f"of {'/'.join(map(str, archs))}: registers, occupancy in percent")
    for name, row in table.items():
        registers = "/".join(str(row.compiled[arch].registers) for arch in archs)
        full = "/".join(str(row.occupancy(arch)) for arch in archs) if row.launch else "launch unknown"
        print(f"{name!s:32} {registers:24} {full}")


def report_changes(before: Table, table: Table, same_nvcc: bool, whole: bool) -> bool:
    """Print the changes; returns whether they are refused. With another nvcc, only spills are refused.

    whole: all kernels were compiled, so a kernel only in the table no longer exists.
    """
    found = compare(before, table)
    spills = [
        f"{name} on sm_{arch}: 0 bytes spilled before, {made.spill_bytes} now; hold fewer values at once"
        for name, row in table.items()
        for arch, made in row.compiled.items()
        if made.spill_bytes
    ]
    unknown_kernels = [f"{name}: not in the table" for name in table if name not in before]
    unknown_kernels += [f"{name}: in the table only" for name in before if whole and name not in table]
    for line in (*spills, *found.worse):
        print(f"WORSE {line}; {REMEDY}", file=sys.stderr)
    for line in (*found.better, *unknown_kernels):
        print(f"CHANGED {line}; run `make check-cuda WRITE=1` to keep it")
    return bool(spills or (same_nvcc and (found.worse or unknown_kernels)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sources", nargs="*", type=Path)
    default = ",".join(map(str, ARCHITECTURES))
    parser.add_argument("--arch", default=default, help=f"comma-separated (default: {default})")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--table", type=Path, default=TABLE, help=f"(default: {TABLE.relative_to(ROOT)})")
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    options = parser.parse_args(argv)
    archs = [int(arch) for arch in options.arch.split(",")]
    if options.write and (options.sources or tuple(archs) != ARCHITECTURES or not TRAFFIC.exists()):
        parser.error("--write takes every source and architecture, and simt_traffic built by `make build`")
    if not options.write and not options.table.is_file():
        parser.error(f"there is no table at {options.table}; make it with --write")
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc is neither on PATH nor under CUDA_HOME; install the CUDA toolkit", file=sys.stderr)
        return 2
    before, by_nvcc = ({}, "") if options.write else from_markdown(options.table.read_text(encoding="utf-8"))
    errors, kernels = compile_all(
        nvcc, options.sources or sorted((ROOT / "kernels/cuda").glob("*.cu")), archs
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))
    for error in errors:
        print(error, file=sys.stderr)
    spilling = [kernel.name for kernel in kernels if kernel.spill_bytes]
    if errors or not kernels or (options.write and spilling):
        print(
            f"{len(errors)} files do not compile, spilling: {', '.join(spilling) or 'none'}", file=sys.stderr
        )
        return 1
    # Compiling only some sources is a quick check, which keeps the recorded launches.
    table = tabulate(kernels, launches_of(before) if options.sources else recorded_launches(before))
    show(table, archs)
    print(f"{len(table)} kernels, {len(spilling)} with spills")
    version = version_of(nvcc)
    if options.write:
        scratch = options.table.with_suffix(".new")
        scratch.write_text(to_markdown(table, version), encoding="utf-8")
        scratch.replace(options.table)
        return 0
    if version != by_nvcc:
        print(
            f"nvcc is {version}, the table is {by_nvcc}'s: differences are reported, only spills are refused"
        )
    return int(report_changes(before, table, version == by_nvcc, not options.sources))


if __name__ == "__main__":
    raise SystemExit(main())
