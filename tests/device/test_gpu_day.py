"""`make gpu-day` without a GPU: what fails, hangs or crashes stops nothing, and the report says what to do about it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.device.gpu_day_runs import (
    ROOT,
    STAND_IN,
    day_command,
    environment,
    only_of,
    read_report,
    wait_for_entries,
)
from tests.gpu import packages
from tests.gpu.checks import NUMBERS, PARTS, SANITIZED, checks, chosen
from tests.gpu.day import Day, Options, unpack_wheels
from tests.gpu.day_report import Report, command

FAULTY = """
import os, time
from benchmarks.gpu.machine import expect
from tests.gpu import kernel_checks
from tests.gpu.stand_in import install, machine
def breaks(machine):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def hangs(machine):
    time.sleep(600)
kernel_checks.routing = breaks
kernel_checks.attention = lambda machine: expect({"relative_error": 0.5}, False, "relative error of at most 2e-02")
kernel_checks.latent_attention = lambda machine: os.abort()
kernel_checks.gated_delta_nets = hangs
"""
SANITIZER = """#!/bin/sh
echo "========= Invalid __global__ read of size 4 bytes"
echo "=========     at place_kernel(RoutedLayer)+0x120"
shift 2
exec "$@"
"""


def running_workers(folder: Path) -> list[str]:
    found = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and not line.startswith("Z")]


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the packages of a GPU machine alone."""
    return str(packages.make_environment(tmp_path_factory.mktemp("bare") / "env"))


def test_a_killed_day_reports_results_and_what_to_run_next(
    fake: ModuleType, tmp_path: Path, bare_python: str
) -> None:
    """In an environment that has the packages of a GPU machine alone."""
    folder, only = tmp_path / "out", "copy bandwidth; routing; handshake probe; serve*"
    started = day_command(folder, *STAND_IN, "--only", only, python=bare_python)
    with subprocess.Popen(started, cwd=ROOT, env=environment()) as process:
        wait_for_entries(folder, 2, process)
        process.kill()
    report = read_report(folder)
    known = [entry["name"] for entry in report["checks"] if entry["state"] in ("passed", "failed")]
    assert known[0] == "copy bandwidth"
    assert report["device"] == {"name": "tests.gpu.stand_in"}
    assert {*known, *report["not_known"]} == {check.name for check in chosen(only)}
    assert [check.name for check in chosen(only_of(report))] == report["not_known"]
    page = (folder / "gpu-day.md").read_text(encoding="utf-8")
    assert page.index("## What to run next") < page.index("- copy bandwidth (passed")
    assert len(list(folder.iterdir())) <= 8
    deadline = time.monotonic() + 10
    while running_workers(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running_workers(folder) == [], "what the day started ends with it"


def test_packages_of_a_gpu_machine_are_not_more_than_it_has(bare_python: str) -> None:
    code = "import importlib.util as i, sys; print(*(n for n in sys.argv[1:] if i.find_spec(n)))"
    names = [*sorted(packages.ABSENT), "torch", "pytest"]
    done = subprocess.run(
        [bare_python, "-c", code, *names], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["torch", "pytest"]
    assert {*packages.IMPORTED_BY_SERVE} <= {*packages.needed_by_serve()}
    assert not {*packages.needed_by_serve()} & packages.closure(packages.THERE, packages.ABSENT)


@pytest.mark.slow
def test_checks_that_break_crash_or_hang_stop_no_other(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/compute-sanitizer"
    tool.write_text(SANITIZER, encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "out"
    only = "routing; rotation*; latent attention; gated delta nets; handshake probe; sanitizer: decode*"
    options = ("--no-build", "--stand-in", "faulty", "--limit-times", "0.2", "--only", only)
    done = subprocess.run(day_command(folder, *options), cwd=ROOT, env=environment(tmp_path), check=False)
    report = read_report(folder)
    assert done.returncode == 1
    states = {entry["name"]: entry["state"] for entry in report["checks"]}
    assert states == {
        "routing": "error",
        "rotation, KV store and decode attention": "failed",
        "latent attention": "not ended",
        "gated delta nets": "not ended",
        "handshake probe": "passed",
        "sanitizer: decode experts, q8_0": "failed",
    }
    ranks = [finding["rank"] for finding in report["look_at"]]
    assert ranks == ["wrong", "wrong", "sanitizer", "not ended", "not ended"]
    broken, attention, memory, crash, hang = report["look_at"]
    assert "an illegal memory access" in broken["what"]
    assert broken["open"] == "kernels/cuda/route_rope.cu"
    assert broken["repeat"] == "make gpu-day MINUTES=4 ONLY=routing"
    assert attention["what"] == "relative_error 0.5; expected: relative error of at most 2e-02"
    assert memory["what"] == "Invalid __global__ read of size 4 bytes at place_kernel(RoutedLayer)+0x120"
    assert memory["open"] == "kernels/cuda/step_control.cu"
    assert "ended with status -6" in crash["what"]
    assert "still running" in hang["what"]
    assert "in hangs" in hang["what"]
    assert running_workers(folder) == []


def test_without_a_device_the_day_ends_with_the_reason(tmp_path: Path) -> None:
    from twofold.device.finding import find_device

    if find_device()[0] is not None:
        pytest.skip("there is a CUDA device here")
    options = day_command(tmp_path / "out", "--no-build", "--only", "routing")
    done = subprocess.run(options, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "nothing was run: " in done.stdout
    report = read_report(tmp_path / "out")
    assert report["device"] is None
    assert report["not_known"] == ["routing"]


def test_no_check_begins_when_the_time_is_up(tmp_path: Path) -> None:
    day = Day(Options(0.0, tmp_path, tmp_path / "models", "basics", builds=False))
    assert day.run() == 0
    states = {(entry["state"], entry["error"]) for entry in read_report(tmp_path)["checks"]}
    assert states == {("not run", "the time was up: 0 s were left")}


@pytest.mark.parametrize(
    ("status", "build"), [(0, r"\d+\.\d s \(CUDA: nvcc for 90\)"), (1, "failed after .*gpu-build.log")]
)
def test_the_build_is_reported_and_a_failed_one_ends_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, build: str
) -> None:
    tool = tmp_path / "bin/cmake"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "-- CUDA: nvcc for 90"\nexit {status}\n', encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setenv("TWOFOLD_BUILD_DIR", str(tmp_path / "build"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))  # whose folder comes first
    day = Day(Options(0.06, tmp_path / "out", tmp_path / "models", "latent attention"))
    assert day.run() == status
    report = read_report(tmp_path / "out")
    assert re.fullmatch(build, report["build"])
    assert report["not_known"] == ["latent attention"]


def test_parts_without_a_result_are_named_as_parts(tmp_path: Path) -> None:
    report = Report(tmp_path, checks(), 9.0)
    report.entries["copy bandwidth"] = {"state": "passed", "figures": {"gbps": 3000.0}, "seconds": 1.0}
    report.entries["handshake per layer"] = {
        "state": "failed",
        "figures": {"us": 12.0, "expected": "at most 10 us", "holds": False},
        "seconds": 1.0,
    }
    repeat, further = report.next_commands()
    assert repeat == command(["handshake per layer"])
    assert "uploads beside the link" in further
    assert further.endswith("; rest; sanitizer'")
    (finding,) = report.findings()
    assert finding["rank"] == "short of its bound"
    assert finding["what"] == "us 12; expected: at most 10 us"


def test_every_check_has_a_file_to_open_and_a_name_of_its_own() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert [check.name for check in checks() if not (ROOT / check.open).is_file()] == []
    assert {check.part for check in checks()} == {*PARTS}
    assert [check.name for check in chosen("sanitizer")] == [f"sanitizer: {name}" for name in SANITIZED]
    assert all(check.kind == NUMBERS for check in chosen("numbers"))
    with pytest.raises(ValueError, match="ONLY was given 'decoed\\*'"):
        chosen("decoed*")


def test_a_list_of_checks_needs_neither_torch_nor_a_build() -> None:
    """The process that builds and watches must start on a machine where nothing is built."""
    code = "import sys, tests.gpu.day; print([n for n in ('torch', 'numpy', 'twofold') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_of_wheels_are_imported_without_installing_them(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "told-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("told/__init__.py", "answer = 42\n")
    path = unpack_wheels(tmp_path, tmp_path / "site")
    assert (Path(path) / "told/__init__.py").read_text(encoding="utf-8") == "answer = 42\n"
    with pytest.raises(SystemExit, match=r"holds no \.whl files; make gpu-wheels collects them"):
        unpack_wheels(tmp_path / "site", tmp_path / "none")


def test_commands_and_parts_are_in_the_status_page() -> None:
    page = (ROOT / "docs/explanation/gpu-status.md").read_text(encoding="utf-8")
    for target in ("gpu-day", "test-gpu", "sanitize-gpu", "bench-gpu", "gpu-wheels", "check-cuda"):
        assert f"make {target}" in page
    for part, decides in PARTS.items():
        assert f"| {part} | {decides} | {len(chosen(part))} |" in page
    # A figure of a GPU in that page needs a commit beside it.
    for line in page.splitlines():
        if line.startswith("|") and line.endswith("passed |"):
            assert "`" in line, line


def test_pytest_needs_no_module_for_tests_alone(tmp_path: Path) -> None:
    """A GPU machine builds what runs, not what only tests use."""
    name = "tests/device/test_gpu_day.py::test_packages_of_wheels_are_imported_without_installing_them"
    pytest_one = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", name]
    env = environment(ROOT / "engine") | {"TWOFOLD_BUILD_DIR": str(tmp_path)}
    done = subprocess.run(pytest_one, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
