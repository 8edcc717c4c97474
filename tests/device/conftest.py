"""The fake device: a module that the source tree's build leaves beside the native test programs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(os.environ.get("TWOFOLD_BUILD_DIR") or Path(__file__).resolve().parents[2] / "build")
BUILT = BUILD / "dev/tests/device/fake"


def built_module(name: str) -> ModuleType:
    if not list(BUILT.glob(f"{name}.*.so")) and os.environ.get("TWOFOLD_TESTS_NEED_ALL") != "1":
        pytest.skip("the fake device is not built beside these sources")
    sys.path.insert(0, str(BUILT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BUILT))


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    return built_module("twofold_fake")


@pytest.fixture
def simt(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake device with the project's kernels for dense layers too, not torch. Graphs read no tensor on the host."""
    from twofold.device.native_kernels import NativeDenseKernels

    from tests.device.fake_device import FakeDevice, FakeQueue, NoHostReads

    monkeypatch.setattr(FakeDevice, "kernels", lambda self, max_length: NativeDenseKernels(self, max_length))
    monkeypatch.setattr(FakeQueue, "captures", NoHostReads)
    return fake
