"""Runs of checks on a GPU: the native modules built for the card at hand, every check an entry of a JSON report.

The measurements beside this file and the checks of tests/gpu write the same report.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine

ROOT: Final = Path(__file__).resolve().parents[2]
Check = Callable[["Machine"], dict[str, Any]]
"""Figures; where an expectation goes with them, "expected" and "holds" (see machine.expect)."""
Named = tuple[str, Check]


def build() -> None:
    """Compile both native modules for this machine's GPU, in a build directory of this interpreter's own."""
    own = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "gpu"
    os.environ["TWOFOLD_BUILD_DIR"] = str(own)  # where `import twofold` looks from here on
    folder = own / "dev"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DTWOFOLD_INPLACE=ON", "-DTWOFOLD_CUDA=AUTO", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)


def run_check(machine: Machine | None, name: str, check: Check, why_not: str | None = None) -> dict[str, Any]:
    """An entry of the report: name, state (passed, failed, error, not run), figures, seconds. Raises nothing.

    machine: None: there is no device. why_not: the check is not to be run, for this reason.
    """
    entry: dict[str, Any] = {"name": name, "state": "not run"}
    if machine is None or why_not:
        return entry | {"error": why_not or "there is no device"}
    began = time.perf_counter()
    try:
        figures = check(machine)
        entry |= {"state": "passed" if figures.get("holds", True) else "failed", "figures": figures}
    except Exception as error:  # every check is to be tried, and the report to be written
        entry |= {"state": "error", "error": str(error), "trace": traceback.format_exc()}
    entry["seconds"] = round(time.perf_counter() - began, 3)
    gc.collect()
    machine.forget()
    return entry


class Run:
    """Checks on this machine's device, and their report, which is written anew after each."""

    def __init__(
        self,
        output: Path | None,
        *,
        build_seconds: float = 0.0,
        budget_s: float = float("inf"),
        dry: bool = False,
        trace: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """output: None: no file. budget_s: no check begins after so many seconds, the build's among them. dry: nothing
        runs, everything is listed. The rest is `Machine`'s; without a folder a temporary one is used."""
        self._output = output
        self._started = time.perf_counter() - build_seconds
        self._deadline = self._started + budget_s
        self._temporary = tempfile.TemporaryDirectory(prefix="twofold-gpu-")
        self.report: dict[str, Any] = {
            "commit": commit(), "device": None, "why_no_device": None, "build_seconds": round(build_seconds, 1),
            "checks": [],
        }  # fmt: skip
        self.machine = None if dry else self._open(trace, folder or Path(self._temporary.name))
        self.why_nothing_runs: str | None = "dry run" if dry else self.report["why_no_device"]
        self._write()

    def _open(self, trace: Path | None, folder: Path) -> Machine | None:
        sys.path.insert(0, str(ROOT / "engine"))
        from twofold.device.experts import devices
        from twofold.experts.accelerator import find_cuda

        module, self.report["why_no_device"] = find_cuda()
        if module is None:
            self.report["why_no_device"] = devices()[1] or self.report["why_no_device"]
            return None
        import torch

        from benchmarks.gpu.machine import REHEARSAL, Machine, Sizes

        self.report |= {"device": devices()[0][0], "why_no_device": None, "torch": torch.__version__}
        return Machine(module, folder, REHEARSAL if module.host_addressable else Sizes(), trace)

    def check(self, name: str, check: Check) -> dict[str, Any]:
        """Run it and put it on record; see `run_check`."""
        late = "the time was up" if time.perf_counter() > self._deadline else None
        entry = run_check(self.machine, name, check, self.why_nothing_runs or late)
        self.report["checks"].append(entry)
        print(f"{entry['state']:8} {name} {entry.get('figures', entry.get('error', ''))}", flush=True)
        self._write()
        return entry

    def close(self) -> None:
        """Delete what was made for the run."""
        if self.machine is not None:
            self.machine.kept.clear()
        self._temporary.cleanup()

    def _write(self) -> None:
        if self._output is None:
            return
        self.report["seconds"] = round(time.perf_counter() - self._started, 1)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(self.report, indent=1, default=str), encoding="utf-8")


def commit() -> str:
    """The commit of this checkout, with "+" where it was changed; "" outside git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
