"""The first day with a GPU in one command and one report: `make gpu-day`.

    python -m tests.gpu.day [--minutes 9] [--folder build/gpu-day] [--only 'NAME; PART'] [--wheels FOLDER]

Builds for the card at hand, then runs the checks of `checks` in the order in which they decide. One process runs them,
and is replaced when a check hangs, crashes or leaves CUDA in an error. FOLDER/gpu-day.md and .json are rewritten
after every check. A second call reuses the build and the models of random weights. Exit status: 0 nothing to look at, 1
something, 3 no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.gpu.checks import SANITIZER, Check, chosen
from tests.gpu.day_report import ROOT, Report, sanitizer_lines

NO_DEVICE: Final = 3
_START_S: Final = 90.0
"""Limit for a worker's start: torch, the device."""
_STOP_S: Final = 3.0
"""Kept at the end of the day, for the report."""
_SANITIZER_S: Final = 40.0
"""The rest begins nothing more when the sanitizer has only this much time left."""
_FINISH_S: Final = 10.0
"""Limit for a process under compute-sanitizer to end."""
_TAIL_LINES: Final = 6
_STACK: Final = "(most recent call first):"


@dataclass(frozen=True)
class Options:
    """How a day runs."""

    minutes: float
    folder: Path
    models: Path
    """Where models of random weights are, for this call and the next."""
    only: str = "*"
    wheels: Path | None = None
    builds: bool = True
    stand_in: str = ""
    """Module with a device in the place of a card; "": a card."""
    trace: Path | None = None
    limit_times: float = 1.0
    """Factor on each check's limit."""


class Worker:
    """A process that runs the checks which are named to it."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        self._log, self._events = folder / "gpu-day.log", folder / "gpu-day.events"
        self._begin = self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        self._events.write_text("", encoding="utf-8")
        self._read = 0
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--events", str(self._events)],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, name: str, limit_s: float) -> None:
        """Have it run this check next; shortly before its limit the stacks of its threads go to the log."""
        self._log_begin = self._log.stat().st_size
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait` finds that it has ended
            self.process.stdin.write(json.dumps([name, limit_s]).encode() + b"\n")
            self.process.stdin.flush()

    def wait(self, kind: str, limit_s: float) -> Any:
        """The next event of this kind; None: it has ended, or the time is up."""
        due = time.monotonic() + limit_s
        while True:
            has_ended = self.process.poll() is not None
            for event in self._new_events():
                if kind in event:
                    return event[kind]
            if has_ended or time.monotonic() > due:
                return None
            time.sleep(0.02)

    def _new_events(self) -> Iterator[dict[str, Any]]:
        data = self._events.read_bytes()[self._read :]
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())

    def log(self) -> str:
        """What it and its children printed since the last check was named."""
        return self._log.read_bytes()[self._log_begin :].decode(errors="replace")

    def finish(self, limit_s: float) -> str:
        """Let it end, and return all that was printed since its start."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(limit_s)
        self._log_begin = self._begin
        return self.log()

    def why(self, limit_s: float) -> str:
        """Why `wait` had no event."""
        log, status = self.log(), self.process.poll()
        if status is None and _STACK in log:  # the main thread is the last one
            log = "\n".join(log.rpartition(_STACK)[2].splitlines()[1:_TAIL_LINES])
        lines = " | ".join(line.strip() for line in log.splitlines()[-_TAIL_LINES:])
        if status is None:
            return f"still running after {limit_s:.0f} s: {lines}"
        return f"its process ended with status {status}: {lines}"

    def end(self) -> None:
        """End it and what it started: a hanging kernel leaves no other way."""
        for ending, wait_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 30.0)):
            if self.process.poll() is None or ending == signal.SIGKILL:
                try:
                    os.killpg(self.process.pid, ending)
                except ProcessLookupError:
                    break
            try:
                self.process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue


class Day:
    """One run of the day."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._checks = chosen(options.only)
        self.report = Report(options.folder, self._checks, options.minutes)
        self._deadline = self.report.began + 60 * options.minutes - _STOP_S
        self._env = dict(os.environ)
        path = os.pathsep.join([self._env.get("PATH", ""), "/usr/local/cuda/bin"])
        self._sanitizer = shutil.which("compute-sanitizer", path=path)
        self._worker: Worker | None = None
        self._is_sanitized = False

    def run(self) -> int:
        """Everything; the exit status."""
        options, report = self._options, self.report
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "gpu-day.log").write_bytes(b"")
        report.write()
        # cmake and ninja of this Python, if it is not the shell's.
        self._env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), self._env.get("PATH", "")])
        paths = [str(ROOT / "engine"), self._env.get("PYTHONPATH", "")]
        if options.wheels is not None:
            paths.append(unpack_wheels(options.wheels, options.models.parent / "gpu-wheels"))
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if options.builds and not self._build():
            return 1
        try:
            return self._run_checks()
        finally:
            if self._worker is not None:
                self._worker.end()
            report.running = ""
            report.write()

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _build(self) -> bool:
        """Compile both native modules for this machine's card. A later call compiles what changed."""
        own = Path(self._env.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "gpu"
        self._env["TWOFOLD_BUILD_DIR"] = str(own)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(own / "dev"),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        configure += ["-DTWOFOLD_INPLACE=ON", "-DTWOFOLD_CUDA=AUTO", f"-DPython_EXECUTABLE={sys.executable}"]
        compile_all = ["cmake", "--build", str(own / "dev"), "-j", str(os.cpu_count() or 1)]
        began, report = time.monotonic(), self.report
        report.build = "running"
        report.write()
        log = self._options.folder / "gpu-build.log"
        problem = ""
        with log.open("wb") as out:
            for command in (configure, compile_all):
                try:
                    subprocess.run(
                        command,
                        check=True,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=self._env,
                        timeout=self._left_s,
                    )
                except (OSError, subprocess.SubprocessError) as error:
                    problem = str(error)
                    break
        seconds = f"{time.monotonic() - began:.1f} s"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        cuda = next((line for line in lines if "CUDA: " in line), "").removeprefix("-- ")
        report.build = f"failed after {seconds}: {problem}; see {log}" if problem else f"{seconds} ({cuda})"
        report.write()
        print(f"build: {report.build}", flush=True)
        return not problem

    def _run_checks(self) -> int:
        for check in self._checks:
            if why_not := self._why_not(check):
                self._keep(check, {"name": check.name, "state": "not run", "error": why_not})
                continue
            self.report.running = check.name
            self.report.write()
            problem = self._ready(check)
            if self.report.facts.get("device", "unknown") is None:
                print(f"nothing was run: {self.report.facts['why_no_device']}", flush=True)
                return NO_DEVICE
            entry = {"state": "not ended", "error": problem} if problem else self._run(check)
            self._keep(check, {"name": check.name, **entry})
        return int(bool(self.report.findings()))

    def _why_not(self, check: Check) -> str:
        """Why a check is not begun; "": it is."""
        left = self._left_s
        if check.kind == SANITIZER and self._sanitizer is None:
            return "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
        waits = check.part == "rest" and any(each.kind == SANITIZER for each in self._checks)
        if left - (_SANITIZER_S if waits else 0.0) < check.needed_s:
            return f"the time was up: {max(0.0, left):.0f} s were left"
        return ""

    def _ready(self, check: Check) -> str:
        """Have a worker that can run it; returns why there is none."""
        sanitized = check.kind == SANITIZER
        if self._worker is not None and (
            self._worker.process.poll() is not None or self._is_sanitized != sanitized
        ):
            self._stop_worker()
        if self._worker is not None:
            return ""
        command = self._worker_command()
        if sanitized:
            command = [str(self._sanitizer), "--tool", "memcheck", *command]
        self._worker, self._is_sanitized = Worker(command, self._env, self._options.folder), sanitized
        limit = min(_START_S, self._left_s)
        facts = self._worker.wait("facts", limit)
        if facts is None:
            why = self._worker.why(limit)
            self._stop_worker()
            return f"no process for it started: {why}"
        self.report.facts = facts
        return ""

    def _worker_command(self) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", "tests.gpu.worker", "--models", str(options.models)]
        command += ["--stand-in", options.stand_in] if options.stand_in else []
        return command + (["--trace", str(options.trace)] if options.trace else [])

    def _run(self, check: Check) -> dict[str, Any]:
        assert self._worker is not None
        limit = max(1.0, min(check.limit_s * self._options.limit_times, self._left_s))
        began = time.monotonic()
        self._worker.ask(check.name, limit)
        entry: dict[str, Any] | None = self._worker.wait("entry", limit)
        is_sound = entry is not None and not entry["lost_context"]
        if entry is None:
            entry = {"state": "not ended", "error": self._worker.why(limit)}
            entry["seconds"] = round(time.monotonic() - began, 1)
        # compute-sanitizer may keep what it found until the process ends.
        if self._is_sanitized and (lines := sanitizer_lines(self._worker.finish(_FINISH_S))):
            entry |= {"sanitizer": lines, "state": "failed"}
        if self._is_sanitized or not is_sound:
            self._stop_worker()
        return entry

    def _stop_worker(self) -> None:
        assert self._worker is not None
        self._worker.end()
        self._worker = None

    def _keep(self, check: Check, entry: dict[str, Any]) -> None:
        self.report.entries[check.name] = entry
        self.report.running = ""
        self.report.write()
        print(f"{entry['state']:9} {entry.get('seconds', 0.0):7.1f} s  {check.name}", flush=True)


def unpack_wheels(folder: Path, target: Path) -> str:
    """The folder to import the packages of these wheels from, which need no installation."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(
            f"WHEELS was given {folder}, which holds no .whl files; make gpu-wheels collects them"
        )
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(target)
    return str(target)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.day", description=(__doc__ or "").split("\n", 1)[0]
    )
    build = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for all of it, the build too (default: 9)"
    )
    parser.add_argument("--folder", type=Path, default=build / "gpu-day", help="where report and logs go")
    parser.add_argument(
        "--models", type=Path, default=build / "gpu-models", help="where random weights are kept"
    )
    parser.add_argument(
        "--only", default="*", help="names, parts or kinds to run, as patterns parted by semicolons"
    )
    parser.add_argument(
        "--wheels", type=Path, help="wheels that this Python lacks, made by `make gpu-wheels`"
    )
    parser.add_argument("--trace", type=Path, help="recorded routing of gpt-oss-20b (npz); default: drawn")
    parser.add_argument(
        "--no-build", dest="builds", action="store_false", help="use what TWOFOLD_BUILD_DIR holds"
    )
    parser.add_argument(
        "--limit-times", type=float, default=1.0, help="factor on each check's limit (default: 1)"
    )
    parser.add_argument("--stand-in", default="", help="a module whose device takes the place of a card's")
    options = parser.parse_args(argv)
    try:
        day = Day(
            Options(
                **{**vars(options), "folder": options.folder.resolve(), "models": options.models.resolve()}
            )
        )
    except ValueError as error:
        parser.error(str(error))
    status = day.run()
    print(f"written to {options.folder / 'gpu-day.md'}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
