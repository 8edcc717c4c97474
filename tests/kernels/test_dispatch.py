"""Which kernels run, and why: the choice at start, TWOFOLD_ISA, and what the object files may contain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import twofold
from twofold._core import weight_formats
from twofold._testing import kernels
from twofold.blocks import ops

from tests.kernels.kernel_levels import summary

ROOT = Path(__file__).resolve().parents[2]
ASK = "from twofold.blocks import ops; print(*ops.isa_choice(), sep='|')"


def ask(isa: str | None, code: str = ASK) -> subprocess.CompletedProcess[str]:
    """A fresh process: the choice is made once and kept."""
    env = {name: value for name, value in os.environ.items() if name != "TWOFOLD_ISA"}
    if isa is not None:
        env["TWOFOLD_ISA"] = isa
    env["PYTHONPATH"] = str(Path(twofold.__file__).parents[1])
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_the_best_level_is_chosen_with_its_reason() -> None:
    name, reason = ask(None).stdout.strip().split("|")
    supported = kernels.supported_levels()
    assert name == supported[-1]
    best, _, measured = reason.partition("; measured the fastest: ")
    assert best == f"best of {', '.join(supported)} on this CPU"
    # A format is measured where several vector levels have a product for the same activations; BF16 for any.
    chosen = {
        name: level
        for level, _, names in (choice.partition(" for ") for choice in measured.split("; ") if choice)
        for name in names.split(", ")
    }
    for name in weight_formats():
        kind = kernels.format_kernel(supported[-1], name)[0]
        owners = {
            kernels.format_kernel(level, name)[1]
            for level in supported[1:]
            if name == "bf16" or kernels.format_kernel(level, name)[0] == kind
        }
        to_choose = len(owners - {"generic"}) > 1
        assert (chosen.get(name) in owners) if to_choose else name not in chosen


@pytest.mark.parametrize("level", kernels.supported_levels())
def test_the_environment_forces_a_level(level: str) -> None:
    assert ask(level).stdout.strip() == f"{level}|TWOFOLD_ISA={level}"


@pytest.mark.parametrize(
    "wrong", ["avx99", "AVX2", *sorted(set(kernels.levels()) - set(kernels.supported_levels()))]
)
def test_a_level_that_cannot_run_is_an_error_wherever_it_is_met(wrong: str) -> None:
    for code in (
        ASK,
        "import numpy as np; from twofold.blocks import ops; a = np.ones((1, 1), np.float32); "
        "ops.Router(ops.ThreadPool(1), norm_weight=a[0], gate_weight=a, eps=1e-6, shape=ops.RouterShape(1))",
    ):
        result = ask(wrong, code)
        assert result.returncode != 0
        assert re.search(rf"ConfigError: TWOFOLD_ISA={wrong}: expected one of generic", result.stderr)


def test_cpu_features_agree_with_the_operating_system() -> None:
    features = ops.cpu_features()
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "flags" not in cpuinfo.read_text():
        pytest.skip("no /proc/cpuinfo with x86 flags here")
    flags = set(re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE).group(1).split())
    for name, present in features.items():
        assert present == (name in flags), name


def test_isa_files_hold_no_standard_containers() -> None:
    """A std:: function compiled with AVX-512 could be linked into code that must run without."""
    for source in (ROOT / "kernels/cpu").rglob("*.*"):
        includes = set(re.findall(r"#include\s+<([^>]+)>", source.read_text()))
        if source.name.startswith("dispatch"):
            continue
        allowed = {"cmath", "cstring", "cstdint", "bit"} if source.parent.name == "generic" else {"cstdint"}
        assert includes <= {"immintrin.h", *allowed}, source.name


def test_isa_objects_define_only_their_own_symbols() -> None:
    nm = shutil.which("nm")
    objects = sorted(ROOT.glob("build/**/cpu/a[mv]x*/*.cpp.o"))
    if nm is None or not objects:
        pytest.skip("no built object files beside these sources (or no nm)")
    for path in objects:
        listing = subprocess.run(
            [nm, "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
        )
        for line in listing.stdout.splitlines():
            kind, name = line.split(maxsplit=2)[1:]
            assert "std::" not in name, f"{path.name}: {name}"
            assert kind.islower() or name.startswith("twofold::kernels::"), f"{path.name}: {line}"
            assert kind not in "WwVvu", f"{path.name} shares {name} with other files"


@pytest.mark.parametrize(
    ("runnable", "line"),
    [
        (["generic", "avx2", "avx512", "amx"], "none"),
        (["generic", "avx2"], "avx512, amx"),
        (["generic", "avx2", "avx512", "amx_emulated"], "none; emulated only: amx"),
    ],
)
def test_the_summary_names_levels_that_no_test_runs(runnable: list[str], line: str) -> None:
    levels = ["generic", "avx2", "avx512", "amx"]
    assert summary(levels, runnable) == f"kernel levels not tested on this CPU: {line}"
