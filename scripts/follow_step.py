"""Shows a step of the build while it runs, keeps its log, and says why it failed.

    { COMMAND 2>&1; printf '\\x1eexit status %d\\n' $?; } | python scripts/follow_step.py --title … --log … …

Reads the step's output from stdin; its last line is the exit status. The last lines are kept in memory, not read from
the log, so that a full disk cannot hide an error. Standard library only: no package is installed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

STATUS = re.compile(r"^(.*)\x1eexit status (\d+)$", re.DOTALL)
NINJA = re.compile(r"^(plan: )?\[(\d+)/(\d+)\] ((?:Building|Linking|Generating) .*)")
LONG = re.compile(r"Building (?:CXX object .*(?:bind_|tensor_arguments|_integer\.)|CUDA)")
"""Targets that compile slowly, scheduled last: bindings, products with integer weights, CUDA kernels."""
LONG_WEIGHT = 6
CHATTER = re.compile(r"-- |plan: |\[\d+/\d+\]|ninja: (?!error)|$")
"""Output of CMake and ninja without problems; it goes to the log only."""
SHOWN_LINES = {False: 20, True: 40}
"""Lines shown of a failed step, by whether it compiles: compilers print more, and two of them alternate."""
PLAIN_EVERY_S = 10.0

NO_NETWORK = re.compile(
    r"name resolution|Name or service not known|NewConnectionError|Failed to establish a new connection|ConnectTimeout|"
    r"Network is unreachable|No route to host|Connection refused|Connection reset|Max retries exceeded|ReadTimeout|"
    r"Read timed out|Cannot connect to proxy|ProxyError|SSLError|nodename nor servname",
    re.IGNORECASE,
)
"""pip's line about each attempt before "no matching distribution" or "conflicting dependencies"."""
UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b")
HOST = re.compile(r"host='([^']+)'")


def causes(lines: Iterable[str], free_bytes: int | None) -> list[str]:
    """Causes of a failure, most certain first; empty if the output itself states the cause.

    `lines`: output lines that match NO_NETWORK or DISK_FULL. `free_bytes`: on the log's disk.
    """
    found = []
    lines = list(lines)
    if any(DISK_FULL.search(line) for line in lines) or (free_bytes is not None and free_bytes < 1 << 20):
        free = "" if free_bytes is None else f" ({free_bytes / 1e6:.0f} MB free beside the log)"
        found.append(f"the disk is full{free}: make room, then run the same command again")
    refused = [line for line in lines if NO_NETWORK.search(line)]
    hosts = sorted({host for line in refused for host in HOST.findall(line)})
    where = f" at {', '.join(hosts)}" if hosts else ""
    if any(UNTRUSTED.search(line) for line in refused):
        found.append(
            f"pip does not trust the certificate of its package index{where}. Behind a proxy that reads traffic, name\n"
            "  the file with its certificates: export PIP_CERT=/etc/ssl/certs/ca-certificates.crt; then run the same\n"
            "  command again"
        )
    elif refused:
        found.append(
            f"no network: pip could not reach its package index{where}. What it says of versions follows from that.\n"
            "  Check the connection and the proxy (https_proxy), or name a mirror in pip's own configuration; then\n"
            "  run the same command again"
        )
    return found


@dataclass
class Progress:
    """ninja's progress: a line rewritten in place on a terminal, else a line every ten seconds."""

    out: TextIO
    is_terminal: bool
    clock: Callable[[], float] = time.monotonic
    begin: float | None = None
    last_shown: float = float("-inf")
    open_line: bool = False
    planned: int = 0
    finished: int = 0

    @staticmethod
    def weight(what: str) -> int:
        return LONG_WEIGHT if LONG.match(what) else 1

    def plan(self, what: str) -> None:
        """Announce that `what` will be done."""
        self.planned += self.weight(what)

    def show(self, done: int, total: int, what: str) -> None:
        """Show that `what`, the `done`-th of `total`, is done."""
        now = self.clock()
        if self.begin is None:
            self.begin = now
        else:
            self.finished += self.weight(what)
        left = (now - self.begin) / max(self.finished, 1) * max(self.planned - self.finished - 1, 0)
        about = f", about {left:.0f} s left" if done > 4 and done < total else ""
        text = f"    compiled {done} of {total}{about}"
        if self.is_terminal:
            self.out.write(f"\r{text}\x1b[K")
            self.open_line = True
        elif now - self.last_shown >= PLAIN_EVERY_S or done == total:
            self.out.write(text + "\n")
            self.last_shown = now
        self.out.flush()

    def end_line(self) -> None:
        if self.open_line:
            self.out.write("\n")
            self.open_line = False


@dataclass
class Log:
    """The log file; it stops at the first write error, which is kept and affects nothing else."""

    path: Path
    problem: str = ""
    file: TextIO | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("w", encoding="utf-8", errors="replace")
        except OSError as error:
            self.problem = f"not written: {error}"

    def write(self, line: str) -> None:
        if self.file is None:
            return
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            self.problem = f"incomplete: {error}"
            with contextlib.suppress(OSError):  # close() tries again to write its buffer
                self.file.close()
            self.file = None


def free_bytes(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def follow(options: argparse.Namespace, source: TextIO, out: TextIO, err: TextIO) -> int:
    begin = time.monotonic()
    log = Log(options.log)
    progress = Progress(out, out.isatty())
    last: deque[str] = deque(maxlen=SHOWN_LINES[options.compile])
    telling: deque[str] = deque(maxlen=50)
    status = 1  # the step was ended before it printed a status
    for line in source:
        if printed := STATUS.match(line):
            line, status = printed[1], int(printed[2])
            if not line:
                break
            line += "\n"
        log.write(line)
        ninja = NINJA.match(line) if options.compile else None
        if ninja and ninja[1]:
            progress.plan(ninja[4])
        elif ninja:
            progress.show(int(ninja[2]), int(ninja[3]), ninja[4])
        if NO_NETWORK.search(line) or DISK_FULL.search(line):
            telling.append(line)
        if options.compile and CHATTER.match(line):
            continue
        if line.strip():
            last.append(line.rstrip("\n"))
        if not options.quiet:
            progress.end_line()
            out.write(line)
            out.flush()
    progress.end_line()
    seconds = time.monotonic() - begin
    if status == 0:
        if not options.quiet:
            out.write(f"    done in {seconds:.0f} s\n")
        return 0
    err.write(f"\nFAILED after {seconds:.0f} s: {options.title}\n")
    for cause in causes(telling, free_bytes(options.log)):
        err.write(f"  cause:   {cause}\n")
    err.write(
        f"  command: {options.command}\n  log:     {options.log}{log.problem and f' ({log.problem})'}\n"
    )
    err.write("  its last lines:\n" + "".join(f"  | {line}\n" for line in last))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--title", required=True, help="what the step does")
    parser.add_argument("--command", required=True, help="what it runs, for the message of a failure")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument(
        "--compile", action="store_true", help="the output is CMake's and ninja's: show progress"
    )
    parser.add_argument("--quiet", action="store_true", help="show progress and failures only")
    sys.stdin.reconfigure(errors="replace")  # type: ignore[attr-defined]
    try:
        return follow(parser.parse_args(), sys.stdin, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
