"""The report of a day with a GPU, written after every check: what is known, what to look at, what to run next."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.gpu.checks import FIGURES, PARTS, Check, checks

ROOT: Final = Path(__file__).resolve().parents[2]
RANKS: Final = ("wrong", "sanitizer", "not ended", "short of its bound")
"""Findings in the order of priority."""
KNOWN: Final = ("passed", "failed")
"""States of a check that gave figures."""
STATUS_PAGE: Final = "docs/explanation/gpu-status.md"
_MOST: Final = 600
"""Characters of a finding's text."""


@dataclass
class Report:
    """State of the day. `write` replaces the files, so that a kill at any time leaves the last whole ones."""

    folder: Path
    checks: Sequence[Check]
    minutes: float
    facts: dict[str, Any] = field(default_factory=dict)
    """Device, torch and what else the first worker said."""
    build: str = "none: what was there is used"
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: state, seconds, and figures or an error."""
    running: str = ""
    began: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        """Both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("gpu-day.json", json.dumps(self.as_json(), indent=1, default=str)),
            ("gpu-day.md", "\n".join(self.lines()) + "\n"),
        ):
            partial = self.folder / "gpu-day.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / name)

    def as_json(self) -> dict[str, Any]:
        return {
            "commit": _COMMIT, **self.facts, "build": self.build, "minutes": self.minutes,
            "seconds": round(time.monotonic() - self.began, 1), "running": self.running, "parts": self.parts(),
            "look_at": self.findings(), "not_known": self.unknown(), "run_next": self.next_commands(),
            "checks": list(self.entries.values()),
        }  # fmt: skip

    def parts(self) -> list[dict[str, Any]]:
        """Each part of the day with what it decides and how much of that is known."""
        summary_of = []
        for part, decides in PARTS.items():
            own = [check.name for check in self.checks if check.part == part]
            entries = [self.entries[name] for name in own if name in self.entries]
            known = sum(entry["state"] in KNOWN for entry in entries)
            if own:
                seconds = round(sum(entry.get("seconds", 0.0) for entry in entries), 1)
                summary_of.append(
                    {"part": part, "decides": decides, "known": known, "of": len(own), "seconds": seconds}
                )
        return summary_of

    def unknown(self) -> list[str]:
        """Names of checks without a result, in order."""
        return [c.name for c in self.checks if self.entries.get(c.name, {}).get("state") not in KNOWN]

    def findings(self) -> list[dict[str, str]]:
        """What to look at, the worst first."""
        found = []
        for check in self.checks:
            entry = self.entries.get(check.name)
            if entry is None or entry["state"] in ("passed", "not run"):
                continue
            text = entry.get("error") or summary_of(entry.get("figures", {}))
            rank = {"error": "wrong", "not ended": "not ended"}.get(entry["state"])
            rank = rank or ("short of its bound" if check.kind == FIGURES else "wrong")
            complaints = [("sanitizer", line) for line in entry.get("sanitizer", [])]
            for each, what in complaints or [(rank, text)]:
                source = _kernel_file(what) or check.open
                finding = {"rank": each, "name": check.name, "what": what[:_MOST], "open": source}
                found.append(finding | {"repeat": command([check.name])})
        return sorted(found, key=lambda finding: RANKS.index(finding["rank"]))

    def next_commands(self) -> list[str]:
        """Commands that repeat what was found, and that run what is not known."""
        found = list(dict.fromkeys(finding["name"] for finding in self.findings()))
        unknown = [name for name in self.unknown() if name not in found]
        parts = {check.name: check.part for check in checks()}
        whole = [part for part in PARTS if {name for name in parts if parts[name] == part} <= {*unknown}]
        names = [*(name for name in unknown if parts[name] not in whole), *whole]
        return [command(each) for each in (found, names) if each]

    def lines(self) -> list[str]:
        """The page."""
        device = (self.facts.get("device") or {}).get("name", "none found")
        device += f", driver {driver}" if (driver := self.facts.get("driver")) else ""
        seconds = time.monotonic() - self.began
        lines = [
            "# A day with a GPU", "",
            f"Commit `{_COMMIT}`, device {device}; build: {self.build}; {seconds:.0f} s of {60 * self.minutes:.0f}.",
            *([f"No device: {self.facts['why_no_device']}."] if self.facts.get("why_no_device") else []),
            *([f"Running when this was written: {self.running}."] if self.running else []), "",
            "| part | decides | known | seconds |", "|---|---|---|---|",
            *(f"| {p['part']} | {p['decides']} | {p['known']} of {p['of']} | {p['seconds']} |" for p in self.parts()),
            "", "## What to look at first", "",
        ]  # fmt: skip
        for number, found in enumerate(self.findings(), 1):
            lines += [
                f"{number}. **{found['rank']}**: {found['name']}", f"   - {found['what']}",
                f"   - open `{found['open']}`", f"   - repeat: `{found['repeat']}`",
            ]  # fmt: skip
        if not self.findings():
            lines.append(f"Nothing that ran. Write device and commit into {STATUS_PAGE}.")
        lines += ["", "## What to run next", "", *(f"    {each}" for each in self.next_commands())]
        lines += ["", "## What is known", ""]
        lines += [
            f"- {name} ({entry['state']}, {entry['seconds']} s): {summary_of(entry.get('figures', {}))}"
            for name, entry in self.entries.items()
            if entry["state"] in KNOWN
        ]
        lines += ["", "## What is not known", ""]
        reasons = {name: self.entries.get(name, {}).get("error", "not begun") for name in self.unknown()}
        return lines + [f"- {name}: {reason.splitlines()[0][:_MOST]}" for name, reason in reasons.items()]


def command(names: Sequence[str]) -> str:
    """The shell command that runs these checks or parts."""
    return f"make gpu-day MINUTES=4 ONLY={shlex.quote('; '.join(names))}"


def summary_of(figures: dict[str, Any]) -> str:
    """Figures in one line, numbers to four digits."""
    rest = ", ".join(
        f"{name} {_short(value)}" for name, value in figures.items() if name not in ("expected", "holds")
    )
    return f"{rest}; expected: {figures['expected']}" if "expected" in figures else rest


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + "; ".join(f"{name}: {_short(each)}" for name, each in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def sanitizer_lines(log: str) -> list[str]:
    """Each kind of complaint of compute-sanitizer once, with its kernel."""
    found = re.findall(
        r"^=+ ((?:Invalid|Misaligned|Race|Barrier|Uninitialized|Program hit).*)\n(?:=+ +at (.*))?", log, re.M
    )
    return list(dict.fromkeys(" at ".join(filter(None, pair)) for pair in found))


def _kernel_file(what: str) -> str:
    """The source that defines the kernel which a sanitizer names; "": it names none."""
    kernel = re.search(r"\b(\w+_kernel)\b", what)
    if kernel is None:
        return ""
    sources = sorted((ROOT / "kernels/cuda").glob("*.cu*"))
    found = (path for path in sources if f"{kernel[1]}(" in path.read_text(encoding="utf-8"))
    return next((str(path.relative_to(ROOT)) for path in found), "")


def _commit() -> str:
    """The commit of this checkout, with "+" where it was changed; "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


_COMMIT: Final = _commit()
