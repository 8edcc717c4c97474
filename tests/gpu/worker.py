"""The process that runs checks one after the other, and appends what happens to a file that `day` reads.

    python -m tests.gpu.worker --events FILE --models FOLDER [--stand-in MODULE] < lines of [name, limit]

It ends with the process that started it. After an error of CUDA it ends by itself, because nothing that a context
computes after one can be trusted; `day` starts the next worker at the next check. `--twofold …` runs a command of
`twofold` instead, on the stand-in's device.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from tests.gpu.checks import Check, checks

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine

LOST_CONTEXT: Final = 4
"""Exit status after an error of CUDA."""
NO_DEVICE: Final = 3
_STACKS_S: Final = 2.0
"""Seconds before a check's limit at which the stacks of all threads go to the log."""
_CUDA_ERRORS: Final = ("CUDA error", "cudaError", "an illegal memory access", "unspecified launch failure")


def run_check(machine: Machine, check: Check, limit_s: float) -> dict[str, Any]:
    """An entry of the report: name, state (passed, failed, error), figures, seconds. Raises nothing."""
    from benchmarks.gpu.machine import CannotRunError

    entry: dict[str, Any] = {"name": check.name}
    began = time.perf_counter()
    faulthandler.dump_traceback_later(max(0.5, limit_s - _STACKS_S))
    try:
        figures = check.run(machine)
        entry |= {"state": "passed" if figures.get("holds", True) else "failed", "figures": figures}
    except CannotRunError as error:
        entry |= {"state": "not run", "error": str(error)}
    except Exception as error:  # every check is to be tried, and the report to be written
        entry |= {"state": "error", "error": str(error), "trace": traceback.format_exc()}
    faulthandler.cancel_dump_traceback_later()
    entry["seconds"] = round(time.perf_counter() - began, 3)
    gc.collect()
    machine.forget()
    return entry


def open_machine(models: Path, stand_in: str, trace: Path | None) -> tuple[Machine | None, dict[str, Any]]:
    """The device of this machine, or of the module `stand_in`; and what the report says of it."""
    from twofold.device import finding

    from benchmarks.gpu.machine import Machine

    if stand_in:
        return importlib.import_module(stand_in).machine(models), {"device": {"name": stand_in}}
    device, why_none = finding.find_device()
    found, none_found = finding.cuda_devices()
    if device is None:
        return None, {"device": None, "why_no_device": none_found or why_none}
    import torch

    facts = {
        "device": found[0], "driver": _driver(), "torch": torch.__version__, "cpu_threads": os.cpu_count(),
    }  # fmt: skip
    return Machine(device, models, trace=trace), facts


def _driver() -> str:
    """The driver's version; "": nvidia-smi does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    requested = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(requested, capture_output=True, text=True, check=False).stdout.split()
    return printed[0] if printed else ""


def _end_with_parent() -> None:
    """A day that is killed leaves no process behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _report(events: IO[str], event: dict[str, Any]) -> None:
    events.write(json.dumps(event, default=str) + "\n")
    events.flush()


def work(requested: Iterable[str], events: IO[str], machine: Machine | None, facts: dict[str, Any]) -> int:
    """Run checks as they are asked for, by lines of [name, limit in seconds]; the exit status."""
    _report(events, {"facts": facts})
    if machine is None:
        return NO_DEVICE
    by_name = {check.name: check for check in checks()}
    for line in requested:
        name, limit_s = json.loads(line)
        entry = run_check(machine, by_name[name], limit_s)
        entry["lost_context"] = any(text in entry.get("error", "") for text in _CUDA_ERRORS)
        _report(events, {"entry": entry})
        if entry["lost_context"]:
            return LOST_CONTEXT
    return 0


def main(argv: list[str]) -> int:
    _end_with_parent()
    if argv[:1] == ["--twofold"]:
        from twofold.tools.cli.main import main as twofold

        importlib.import_module(argv[1]).install()
        return twofold(argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.worker")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--stand-in", default="")
    options = parser.parse_args(argv)
    machine, facts = open_machine(options.models, options.stand_in, options.trace)
    with options.events.open("a", encoding="utf-8") as events:
        status = work(sys.stdin, events, machine, facts)
    sys.stdout.flush()
    # Native threads of a broken context could hang the interpreter's end.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
