"""The first day with a GPU in one command and one report: `make gpu-day`.

    python -m tests.gpu.day [--minutes 25] [--folder build]

Runs the checks of numbers, the measurements and the sanitizer one after the other, each as a process of its own that is
ended when its share of the time is up; what one leaves over the next may use. Nothing that fails or hangs stops the
rest. FOLDER/gpu-day.md and .json hold a verdict of each part and what to look at first: wrong numbers, then what the
sanitizer found, then what did not come to its end, then figures short of their bound, each with the file to open and
the command that repeats it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.report import ROOT, commit

RANKS: Final = ("wrong", "sanitizer", "not ended", "short of its bound", "not run")
"""Verdicts in the order of priority."""
_STOPPING_S: Final = 20.0
"""Part of a part's share, kept for running work once nothing more should begin."""
_SANITIZER_ERRORS: Final = 9
"""Exit status of a sanitizer that found something."""
OPEN: Final = (
    ("decode *", "kernels/cuda/expert_decode.cuh"),
    ("prefill *", "kernels/cuda/expert_prefill.cuh"),
    ("torch's *", "benchmarks/gpu/kernel_speed.py"),
    ("copy bandwidth", "benchmarks/gpu/kernel_speed.py"),
    ("routing", "kernels/cuda/route_rope.cu"),
    ("rotation*", "kernels/cuda/decode_attention.cu"),
    ("latent attention", "kernels/cuda/mla_attention.cu"),
    ("gated delta nets", "kernels/cuda/gated_delta.cu"),
    ("handshake*", "kernels/cuda/step_control.cu"),
    ("hits on the GPU*", "kernels/cuda/step_control.cu"),
    ("*without a server*", "kernels/cuda/step_control.cu"),
    ("*lost step*", "engine/twofold/device/runner.py"),
    ("logits against*", "engine/twofold/device/model.py"),
    ("logits*", "engine/twofold/device/table_layers.py"),
    ("placement frozen*", "engine/twofold/device/table_layers.py"),
    ("every placement*", "engine/runtime/device/device_accelerator.cpp"),
    ("uploads*", "engine/runtime/device/upload_engine.cpp"),
    ("policy*", "engine/core/layer_scheduler.cpp"),
    ("calibration*", "engine/twofold/device/calibration.py"),
    ("predicted*", "engine/core/cost_model.cpp"),
    ("graph*", "engine/twofold/device/graphs.py"),
    ("launching*", "engine/twofold/device/graphs.py"),
    ("rules*", "engine/core/layer_scheduler.cpp"),
    ("telemetry*", "engine/twofold/telemetry/run_writer.py"),
    ("a layer's experts on the CPU*", "engine/runtime/device/mailbox_experts.cpp"),
)
"""First file to read, by name pattern of a check or measurement."""
STATUS_PAGE = "docs/explanation/gpu-status.md"
"""The page that lists what has run on which GPU."""


@dataclass(frozen=True)
class Part:
    """One of the day's runs."""

    name: str
    share: float
    """Share of the day's time."""
    command: Sequence[str]
    """{json} and {budget}: where its report goes, and the seconds after which it begins nothing more."""
    names: Sequence[str]
    """Names of all that it runs, in order."""
    repeat: str
    """The command that runs one of them again; {name}."""
    failed: str = "wrong"
    """Verdict of a failed entry; see RANKS."""


@dataclass
class Told:
    """Result of a part."""

    name: str
    verdict: str
    seconds: float
    findings: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    device: Any = None


def file_of(name: str) -> str:
    """First file to read when this check or measurement fails."""
    return next((path for pattern, path in OPEN if fnmatch.fnmatch(name, pattern)), STATUS_PAGE)


def parts() -> list[Part]:
    """The day: half of what remains for numbers and figures each would starve the sanitizer, so it has a share."""
    from benchmarks.gpu.__main__ import checks as measurements
    from tests.gpu.checks import SANITIZED, checks

    python = os.environ.get("PYTHON") or shutil.which("python3") or sys.executable
    pytest = [python, "-m", "pytest", "-s", "tests/gpu", "--gpu-build", "--gpu-json", "{json}"]
    pytest += ["--gpu-budget-s", "{budget}"]
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"
    memcheck = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_ERRORS)]
    one = "PYTHONPATH=engine python3 -m pytest -s -m gpu 'tests/gpu/test_gpu.py::test_on_a_gpu[{name}]' --gpu-build"
    speed = [python, "-m", "benchmarks.gpu", "--json", "{json}", "--budget-s", "{budget}"]
    return [
        Part("check", 0.4, [*pytest, "-m", "gpu"], [name for name, _ in checks()], one),
        Part(
            "bench", 0.4, speed, [name for name, _ in measurements()], "python3 -m benchmarks.gpu --only '{name}'",
            failed="short of its bound",
        ),
        Part(
            "sanitizer", 0.2, [*memcheck, *pytest, "-m", "gpu and sanitized"],
            [name for name, _ in checks() if name in SANITIZED], "compute-sanitizer --tool memcheck " + one,
        ),
    ]  # fmt: skip


def run_part(part: Part, limit_s: float, folder: Path) -> Told:
    """Run it for at most so long, and read what it left. Raises nothing that a part can cause."""
    report, log = folder / f"gpu-day-{part.name}.json", folder / f"gpu-day-{part.name}.log"
    report.unlink(missing_ok=True)
    budget = max(limit_s - _STOPPING_S, limit_s / 2)
    command = [
        word.replace("{json}", str(report)).replace("{budget}", f"{budget:.0f}") for word in part.command
    ]
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "engine"), env.get("PYTHONPATH")]))
    began = time.perf_counter()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            finding = _finding(part, "", "not run", f"{command[0]} could not be started ({error.strerror})")
            return Told(part.name, "not run", 0.0, [finding])
        try:
            in_time = _has_ended(process, limit_s)
        finally:
            _end(process)
        status = process.returncode if in_time else None
    told = _read(part, report, log, status, limit_s)
    told.seconds = round(time.perf_counter() - began, 1)
    return told


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part and what it started: a hanging kernel leaves no other way."""
    for ending, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        os.killpg(process.pid, ending)
        _has_ended(process, wait_s)
    process.poll()


def _has_ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for it at most so long and leave it a zombie: until it is reaped no other group gets its number."""
    due = time.monotonic() + limit_s
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > due:
            return False
        time.sleep(0.05)
    return True


def _read(part: Part, report: Path, log: Path, status: int | None, limit_s: float) -> Told:
    try:
        left = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        left = {"checks": []}
    findings = []
    counts: dict[str, int] = {}
    for entry in left["checks"]:
        name, state = entry["name"], entry["state"]
        counts[state] = counts.get(state, 0) + 1
        what = entry.get("error") or _figures(entry.get("figures", {}))
        if state == "not run":
            findings.append(_finding(part, name, state, what))
        elif state != "passed":
            findings.append(_finding(part, name, part.failed if state == "failed" else "wrong", what))
    findings += [_finding(part, "", "sanitizer", line) for line in _sanitizer_lines(log)]
    done = {entry["name"] for entry in left["checks"]}
    next_one = next((name for name in part.names if name not in done), "")
    if status is None:
        findings.append(
            _finding(part, next_one, "not ended", f"still running when its {limit_s:.0f} s were up")
        )
    elif not left["checks"] or status not in (0, 1, _SANITIZER_ERRORS):
        tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        findings.append(_finding(part, next_one, "not ended", f"ended with status {status}: {tail}"))
    worst = min((RANKS.index(finding["rank"]) for finding in findings), default=None)
    verdict = "passed" if worst is None else RANKS[worst]
    return Told(part.name, verdict, 0.0, findings, counts, left.get("device"))


def _figures(figures: dict[str, Any]) -> str:
    expected = figures.get("expected", "")
    rest = ", ".join(
        f"{name} {value}" for name, value in figures.items() if name not in ("expected", "holds")
    )
    return f"{rest}; expected: {expected}"


def _sanitizer_lines(log: Path) -> list[str]:
    """Each kind of complaint once, with its kernel."""
    text = log.read_text(encoding="utf-8", errors="replace")
    told = re.findall(
        r"^=+ ((?:Invalid|Misaligned|Race|Barrier|Uninitialized|Program hit).*)\n(?:=+ +at (.*))?", text, re.M
    )
    return list(dict.fromkeys(" at ".join(filter(None, pair)) for pair in told))


def _finding(part: Part, name: str, rank: str, what: str) -> dict[str, str]:
    return {
        "rank": rank, "part": part.name, "name": name or part.name, "what": what[:600],
        "open": _kernel_file(what) or (file_of(name) if name else f"build/gpu-day-{part.name}.log"),
        "repeat": part.repeat.format(name=name) if name else shlex.join(["make", _TARGETS.get(part.name, "gpu-day")]),
    }  # fmt: skip


_TARGETS: Final = {"check": "test-gpu", "bench": "bench-gpu", "sanitizer": "sanitize-gpu"}


def _kernel_file(what: str) -> str:
    """The source that defines the kernel which a sanitizer names; "": it names none."""
    kernel = re.search(r"\b(\w+_kernel)\b", what)
    if kernel is None:
        return ""
    sources = sorted((ROOT / "kernels/cuda").glob("*.cu*"))
    found = (path for path in sources if f"{kernel[1]}(" in path.read_text(encoding="utf-8"))
    return next((str(path.relative_to(ROOT)) for path in found), "")


def run_day(day: Sequence[Part], minutes: float, folder: Path) -> list[Told]:
    """All parts, and the report after each: a machine that is taken away leaves what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    told: list[Told] = []
    for index, part in enumerate(day):
        left_s = 60 * minutes - (time.perf_counter() - began)
        shares = sum(other.share for other in day[index:])
        print(f"{part.name}: at most {left_s * part.share / shares:.0f} s", flush=True)
        told.append(run_part(part, max(left_s * part.share / shares, 1.0), folder))
        print(f"{part.name}: {told[-1].verdict} {told[-1].counts}", flush=True)
        write(told, folder)
    return told


def ranked(told: Sequence[Told]) -> list[dict[str, str]]:
    """Findings in the order of priority."""
    return sorted(
        (finding for part in told for finding in part.findings), key=lambda f: RANKS.index(f["rank"])
    )


def write(told: Sequence[Told], folder: Path) -> None:
    """The report, both ways."""
    findings = ranked(told)
    device = next((part.device for part in told if part.device), None)
    report = {
        "commit": commit(),
        "device": device,
        "parts": [asdict(part) for part in told],
        "look_at": findings,
    }
    lines = [
        "# A day with a GPU", "", f"Commit `{report['commit']}`, device {device or 'none found'}.", "",
        "| part | verdict | checks | seconds |", "|---|---|---|---|",
        *(
            f"| {part.name} | {part.verdict} | {', '.join(f'{n} {state}' for state, n in part.counts.items())} "
            f"| {part.seconds} |"
            for part in told
        ),
        "", "## What to look at first", "",
    ]  # fmt: skip
    for number, finding in enumerate(findings, 1):
        lines += [
            f"{number}. **{finding['rank']}** ({finding['part']}): {finding['name']}",
            f"   - {finding['what']}",
            f"   - open `{finding['open']}`",
            f"   - repeat: `{finding['repeat']}`",
        ]
    if not findings:
        lines.append(
            f"Nothing: every check passed and every figure holds. Write device and commit into {STATUS_PAGE}."
        )
    for name, text in (
        ("gpu-day.json", json.dumps(report, indent=1, default=str)),
        ("gpu-day.md", "\n".join(lines) + "\n"),
    ):
        partial = folder / (name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if there is nothing to look at."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.day", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it (default: 25)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where reports and logs go")
    options = parser.parse_args(argv)
    told = run_day(parts(), options.minutes, options.folder)
    print(f"written to {options.folder / 'gpu-day.md'}")
    return int(any(part.findings for part in told))


if __name__ == "__main__":
    raise SystemExit(main())
