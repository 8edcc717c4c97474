"""The tests that compute, once more at every level of the CPU kernels, and with torch held to lesser CPUs.

A test must not take the level of the machine it was written on for granted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from twofold._testing import kernels

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "core",
    "device",
    "e2e",
    "engine",
    "experts",
    "models",
    "native",
    "weights",
    "server/test_real_engine.py",
)
"""tests/kernels runs every level whatever is chosen: once more beside a lesser torch is enough."""
LESSER_TORCH = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""What torch and its libraries are held to beside a level, one after the other: torch's own choice first."""


def cases() -> list[object]:
    held = [(level, {}) for level in kernels.supported_levels()]
    held += [(level, LESSER_TORCH[level]) for level in kernels.supported_levels() if level in LESSER_TORCH]
    return [
        pytest.param(level, limits, part, id=f"{level}{'-lesser-torch' if limits else ''}-{part}")
        for level, limits in held
        for part in (*PARTS, *(("kernels",) if limits else ()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("level", "limits", "part"), cases())
def test_the_suite_passes_at_every_level(level: str, limits: dict[str, str], part: str) -> None:
    """Within ten minutes for each part."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", f"tests/{part}"],
        cwd=ROOT,
        env=os.environ | limits | {"TWOFOLD_ISA": level},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=570,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"TWOFOLD_ISA={level} {limits}:\n{result.stdout[-6000:]}"
