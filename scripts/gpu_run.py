"""What gpu_test.py and gpu_bench.py share: building for this machine's GPU, and running checks into a JSON file."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
Check = Callable[["Machine"], dict[str, Any]]
"""Figures; where an expectation goes with them, "expected" and "holds" (see gpu.machine.expect)."""
Named = tuple[str, Check]


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """The flags of both scripts."""
    parser.add_argument("--no-build", action="store_true", help="use what is built beside the sources")
    parser.add_argument("--dry-run", action="store_true", help="build nothing, run no check, list them all")
    parser.add_argument("--only", metavar="PATTERN", help="checks whose name matches, e.g. 'decode*'")
    parser.add_argument(
        "--budget-s", type=float, default=570.0, help="no check begins after so many seconds (default: 570)"
    )
    parser.add_argument(
        "--trace", type=Path, help="recorded routing (npz with ids, probs, offsets); default: drawn"
    )
    parser.add_argument(
        "--folder", type=Path, help="where models of random weights are written (default: temporary)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / output, help="where figures go")


def build() -> None:
    """Compile both native modules for this machine's GPU, in a build directory of this interpreter's own."""
    own = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "gpu"
    os.environ["TWOFOLD_BUILD_DIR"] = str(own)  # where `import twofold` looks from here on
    folder = own / "dev"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DTWOFOLD_INPLACE=ON", "-DTWOFOLD_CUDA=AUTO", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)


def run_checks(
    machine: Machine, checks: Sequence[Named], deadline: float = float("inf")
) -> list[dict[str, Any]]:
    """An entry for each: name, state (passed, failed, error, not run), figures, seconds. None stops the others."""
    entries = []
    for name, check in checks:
        entry: dict[str, Any] = {"name": name, "state": "not run"}
        begin = time.perf_counter()
        if begin > deadline:
            entry["error"] = "the time was up"
        else:
            try:
                figures = check(machine)
                entry |= {"state": "passed" if figures.get("holds", True) else "failed", "figures": figures}
            except Exception as error:  # every check is to be tried, and the report to be written
                entry |= {"state": "error", "error": str(error), "trace": traceback.format_exc()}
            entry["seconds"] = round(time.perf_counter() - begin, 3)
            gc.collect()
            machine.forget()
        entries.append(entry)
        print(f"{entry['state']:8} {name} {entry.get('figures', entry.get('error', ''))}", flush=True)
    return entries


def run(options: argparse.Namespace, checks: Sequence[Named]) -> int:
    """Build, run every check, leave the JSON. See the scripts for the exit status."""
    report: dict[str, Any] = {"commit": commit(), "device": None, "why_no_device": None, "checks": []}
    started = time.perf_counter()
    checks = [pair for pair in checks if fnmatch.fnmatch(pair[0], options.only or "*")]
    if not options.dry_run and not options.no_build:
        build()
    report["build_seconds"] = round(time.perf_counter() - started, 1)
    sys.path.insert(0, str(ROOT / "engine"))
    from twofold.device.finding import cuda_devices, find_device

    found, why = cuda_devices()
    report["device"], report["why_no_device"] = (found[0] if found else None), why
    ready = bool(found) and not options.dry_run
    if ready:
        import torch
        from gpu.machine import Machine

        device, why_not = find_device()
        report["torch"], report["why_no_device"] = torch.__version__, why or why_not
        ready = device is not None
    if ready:
        with tempfile.TemporaryDirectory(prefix="twofold-gpu-") as temporary:
            machine = Machine(device, options.folder or Path(temporary), trace=options.trace)
            report["checks"] = run_checks(machine, checks, started + options.budget_s)
    else:
        report["checks"] = [{"name": name, "state": "not run"} for name, _ in checks]
        for name, _ in checks:
            print(f"not run  {name}")
    report["seconds"] = round(time.perf_counter() - started, 1)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1, default=str))
    print(f"written to {options.json}")
    if not ready:
        print(f"nothing was run: {report['why_no_device'] or 'dry run'}", file=sys.stderr)
        return 0 if options.dry_run else 3
    return int(any(entry["state"] in ("failed", "error") for entry in report["checks"]))


def commit() -> str:
    """The commit of this checkout, with "+" where it was changed; "" outside git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
