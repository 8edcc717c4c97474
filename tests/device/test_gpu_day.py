"""`make gpu-day` rehearsed: what fails, hangs or cannot start stops nothing, and the report ranks what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.device.test_gpu_rehearsal import STAND_IN
from tests.gpu import day

ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import functools, sys
import twofold_fake
from benchmarks.gpu import machine, report
from tests.device.fake_device import FakeDevice
from twofold.device import finding
finding.cuda_devices = lambda: ([{"name": "a stand-in"}], "")
finding.find_device = lambda index=0: (FakeDevice(twofold_fake.open_device()), "")
machine.Machine = functools.partial(machine.Machine, sizes=machine.REHEARSAL)
from benchmarks.gpu import __main__ as speed, kernel_speed
kernel_speed.handshake = lambda machine: report and {"us": 12.0, "expected": "at most 10 us", "holds": False}
raise SystemExit(speed.main(["--no-build", "--only", "handshake*", *sys.argv[1:]]))
"""
SANITIZER = """
import subprocess, time
print("========= COMPUTE-SANITIZER")
print("========= Invalid __global__ read of size 4 bytes")
print("=========     at place_kernel(RoutedLayer)+0x120", flush=True)
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def part(name: str, share: float, command: list[str], **fields: object) -> day.Part:
    of_name = {each.name: each for each in day.parts()}.get(name)
    names = of_name.names if of_name else ()
    return day.Part(name, share, command, names, "again '{name}'", **fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_day_ends_in_time_and_ranks_what_it_found(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = str(Path(fake.__file__ or "").parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([beside, os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    few = "test_on_a_gpu and (rout or rotation or probe)"
    check = [sys.executable, "-c", STAND_IN, "-m", "gpu", "tests/gpu", "-k", few, "-p", "no:cacheprovider"]
    told = day.run_day(
        [
            part("sanitizer", 0.02, [sys.executable, "-c", SANITIZER]),
            part("check", 0.5, [*check, "--gpu-json", "{json}", "--gpu-budget-s", "{budget}"]),
            part("bench", 0.4, [sys.executable, "-c", SLOW, "--json", "{json}"], failed="short of its bound"),
            part("missing", 0.08, ["no-such-program"]),
        ],
        minutes=4,
        folder=tmp_path,
    )
    assert 4 < told[0].seconds < 30, "ended when its share of the time was up, not later"
    assert [each.verdict for each in told] == ["sanitizer", "wrong", "short of its bound", "not run"]
    assert told[1].counts == {"error": 1, "failed": 1, "passed": 1}
    log = (tmp_path / "gpu-day-sanitizer.log").read_text(encoding="utf-8")
    running = subprocess.run(
        ["ps", "-o", "stat=", "-p", log.split()[-1]], capture_output=True, text=True, check=False
    )
    assert running.stdout.strip() in ("", "Z"), "what a part started ends with it"

    report = json.loads((tmp_path / "gpu-day.json").read_text(encoding="utf-8"))
    assert report["device"] == {"name": "a stand-in"}
    assert [finding["rank"] for finding in report["look_at"]] == [
        "wrong",
        "wrong",
        "sanitizer",
        "not ended",
        "short of its bound",
        "not run",
    ]
    routing, attention, memory, hang, slow, missing = report["look_at"]
    assert "the device is gone" in routing["what"]
    assert (routing["open"], attention["open"]) == (
        "kernels/cuda/route_rope.cu",
        "kernels/cuda/decode_attention.cu",
    )
    assert routing["repeat"] == "again 'routing'"
    assert memory["open"] == "kernels/cuda/step_control.cu"
    assert memory["what"] == "Invalid __global__ read of size 4 bytes at place_kernel(RoutedLayer)+0x120"
    assert hang["name"] == told[0].findings[1]["name"] == next(iter(day.parts()[2].names))
    assert "still running" in hang["what"]
    assert slow["what"] == "us 12.0; expected: at most 10 us"
    assert "could not be started" in missing["what"]
    page = (tmp_path / "gpu-day.md").read_text(encoding="utf-8")
    assert (
        page.index("1. **wrong** (check): routing") < page.index("place_kernel") < page.index("5. **short of")
    )


def test_every_check_and_measurement_has_a_file_to_open_and_a_command() -> None:
    for each in day.parts():
        assert each.names
        for name in each.names:
            path = day.file_of(name)
            assert path != "docs/explanation/gpu-status.md", name
            assert (ROOT / path).exists(), path
            assert name in each.repeat.format(name=name)
    assert sum(each.share for each in day.parts()) == pytest.approx(1.0)
