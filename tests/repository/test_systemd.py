"""The systemd unit of ranks: its flags are those of serve, one place per machine, and a stop that waits for answers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from twofold.api.config import ServerConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import from_namespace
from twofold.parallel.place import find_place
from twofold.tools.cli.main import build_parser

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNIT = FOLDER / "twofold-rank@.service"
GUIDE = FOLDER.parents[1] / "docs/guides/scale-out/ranks.md"


def settings(text: str) -> dict[str, str]:
    """NAME=value lines of a unit or an environment file."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def command_of_machine(number: int) -> list[str]:
    variables = settings((FOLDER / "ranks.env").read_text("utf-8"))
    given = settings(UNIT.read_text("utf-8"))["ExecStart"].replace("%i", str(number))
    return [re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word) for word in shlex.split(given)]


def test_each_machine_has_a_place_of_its_own() -> None:
    places = []
    for number in (0, 1):
        _, *words = command_of_machine(number)
        args = build_parser("serve").parse_args(words)
        places.append(find_place(from_namespace(ParallelConfig, args, {}), {}))
    first, second = places
    assert (first.rank, second.rank) == (0, 1)
    assert (first.has_store, second.has_store) == (True, False)
    assert (first.address, first.port, first.size) == (second.address, second.port, second.size)


def test_ranks_reconnect_and_running_answers_finish() -> None:
    unit = settings(UNIT.read_text("utf-8"))
    # A rank ends with 0 when rank 0 is stopped, so `on-failure` would leave it ended.
    assert unit["Restart"] == "always"
    assert unit["StartLimitIntervalSec"] == "0"
    assert unit["KillMode"] == "mixed"
    assert float(unit["TimeoutStopSec"]) > ServerConfig.drain_timeout_s


def test_the_guide_names_both_files_and_both_sides() -> None:
    guide = GUIDE.read_text("utf-8")
    for name in ("twofold-rank@.service", "ranks.env", "twofold-rank@0", "twofold-rank@1"):
        assert name in guide, name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "twofold-rank@0.service"
    text = UNIT.read_text("utf-8").replace("/opt/twofold/bin/twofold", sys.executable)
    unit.write_text(text.replace("User=twofold", "User=root"), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    problems = [line for line in done.stderr.splitlines() if unit.name in line]
    assert problems == []
