"""Runs the native test programs (CMakeLists.txt beside this file), one test per case.

They hold what Python cannot reach: CUDA's device functions compiled for the CPU, protocols between
threads; and CUDA's kernels as they are, on the SIMT machine (tests/simt).
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("TWOFOLD_BUILD_DIR") or ROOT / "build") / "dev/tests"
NAMES = [
    "native_cuda_kernels",
    "native_draft_records",
    "native_levels",
    "native_mailbox",
    "native_mailbox_experts",
    "native_selection",
    "native_state_cache",
    "native_table_step",
    "native_thread_pool",
    "simt_faults",
    "simt_kernels",
]
LONG = {"ten_million_handshakes", "many_steps_of_many_uploads", "records_follow_ten_thousand_steps_of_drafts"}


def path_of(name: str) -> Path:
    return PROGRAMS / name.split("_")[0] / name


@functools.cache
def cases(name: str) -> tuple[str, ...]:
    program = path_of(name)
    if not program.exists():
        return ()
    listing = subprocess.run([program], capture_output=True, text=True, check=True, timeout=30)
    return tuple(listing.stdout.split())


def parameters() -> list[object]:
    return [
        pytest.param(name, case, id=f"{name}-{case}", marks=[pytest.mark.slow] if case in LONG else [])
        for name in NAMES
        for case in cases(name)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_is_built_and_has_cases(name: str) -> None:
    if not cases(name) and os.environ.get("TWOFOLD_TESTS_NEED_ALL") != "1":
        pytest.skip("the native test programs are not built beside these sources")
    assert cases(name)


@pytest.mark.parametrize(("name", "case"), parameters())
def test_native(name: str, case: str) -> None:
    limit_s = (
        570 if case in LONG else 280
    )  # below the limits of tests/conftest.py, to show what it has printed
    done = subprocess.run([path_of(name), case], capture_output=True, text=True, check=False, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
