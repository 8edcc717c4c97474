"""`make` and its scripts: every target is listed, scripts run, and failures say what failed and why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from twofold.tools.cli.main import build_parser

from scripts.ports import port_is_free
from scripts.renew_screenshots import load_command
from tests.repository.sourced_build_steps import sourced

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = {"help", "usable-ports", "ready-run", "ready-dev"}


def phony_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(" ".join(re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE)).split())


@pytest.fixture(scope="module")
def help_text() -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not there")
    return subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_lists_every_target_with_a_sentence(help_text: str) -> None:
    listed = dict(re.findall(r"^  make (\S+)\s+(\S.*)$", help_text, re.MULTILINE))
    assert phony_targets() - INTERNAL <= set(listed)


def test_ci_runs_the_tests_at_every_level_and_the_linters() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.findall(r"^limited \d+ (\S+)$", script, re.MULTILINE) == [
        "ready-dev",
        "test",
        "test-levels",
        "lint",
        "docs",
    ]


@pytest.mark.parametrize("level", ["avx2", "generic", "amx"])
def test_levels_repeat_what_make_test_left(help_text: str, level: str) -> None:
    """Where the best level is `level`; nothing is built or run: `echo` stands for the interpreter's tests."""
    lesser = {"avx2": " generic ", "generic": "  ", "amx": " generic avx2 avx512 "}[level]
    script = subprocess.run(
        ["make", "-n", "test-levels", "AVX2_TESTS=one", "GENERIC_TESTS=two"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    script = re.sub(
        r"lesser=\$\([^\n]*?\'\);", f"lesser='{lesser}';", script[script.index("lesser=") :], flags=re.S
    )
    script = re.sub(r"\S+/python -m pytest", "echo ran", script)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    ran = re.findall(r"^ran.* (\w+)$", done.stdout, re.MULTILINE)
    assert ran == {"avx2": ["two"], "generic": [], "amx": ["one", "two"]}[level]


def test_a_checkout_whose_folder_has_a_space_runs(tmp_path: Path) -> None:
    """From `make run` to the server's start; stubs of Python and CMake write down how they are called."""
    folder = tmp_path / "two words"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "cmake", "twofold"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/asked"\n')
        (programs / name).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TWOFOLD_", "MAKE"))
    }
    port = next(port for port in range(20000, 60000) if port_is_free(port) and port_is_free(port + 1))
    installed = (
        "source scripts/build_steps.sh; check_prerequisites; installation_fingerprint >.venv/.installed-run"
    )
    for command in (
        ["bash", "-euc", installed],
        ["make", "run", f"PORT={port}", f"DASHBOARD_PORT={port + 1}"],
        ["make", "doctor", "MODEL=~/two words"],
    ):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    requested = (folder / "asked").read_text().splitlines()
    assert any(f"cmake -S {folder} -B {folder}/build/dev" in line for line in requested)
    assert any(line.startswith(f"python -m scripts.run_stack --port={port} --dash") for line in requested)
    assert requested[-1] == f"twofold doctor {environment['HOME']}/two words"


def test_a_port_that_is_none_is_refused_before_set_up(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", "run", "PORT=99999"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "PORT was given '99999'; expected a port from 1 to 65535" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_missing_compiler_is_named_with_its_remedy() -> None:
    done = sourced("check_prerequisites", CXX="no-such-compiler")
    assert done.returncode == 2
    assert "no-such-compiler" in done.stderr
    assert re.search(r"apt-get install -y .*g\+\+", done.stderr)


def test_a_failing_step_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = sourced(
        f"LOG_DIR={tmp_path}; broken() {{ echo working; echo the reason >&2; return 3; }}; run_step 'Do it' broken"
    )
    assert done.returncode == 1
    assert "FAILED after" in done.stderr
    assert "Do it" in done.stderr
    assert "| the reason" in done.stderr


def test_a_successful_step_keeps_its_log(tmp_path: Path) -> None:
    done = sourced(f"LOG_DIR={tmp_path}; run_step 'Say it' echo hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "01-say-it.log").read_text() == "hello\n"


def test_initial_build_refuses_an_unknown_profile() -> None:
    done = subprocess.run(
        ["scripts/initial_build.sh", "all"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "takes run or dev" in done.stderr) == (2, True)


def test_the_load_of_the_screenshots_is_a_command() -> None:
    words = load_command("http://127.0.0.1:1", seconds=60, users=6)
    words = words[words.index("loadtest") :]
    assert build_parser("loadtest").parse_args(words).users == 6
