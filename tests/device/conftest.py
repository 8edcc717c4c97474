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
    """The fake device in the place of `twofold._cuda`: dense layers, too, run the project's kernels, not torch."""
    import twofold

    from tests.device.fake_device import FakeDevice

    monkeypatch.setitem(sys.modules, "twofold._cuda", fake)
    monkeypatch.setattr(twofold, "_cuda", fake, raising=False)
    # As if it were imported for the first time: on a machine with CUDA it knows another module.
    monkeypatch.delitem(sys.modules, "twofold.device.cuda_kernels", raising=False)
    kernels = importlib.import_module("twofold.device.cuda_kernels")
    monkeypatch.setitem(sys.modules, "twofold.device.cuda_kernels", kernels)
    monkeypatch.setattr(kernels, "stream", lambda: 0)
    monkeypatch.setattr(FakeDevice, "kernels", lambda self, max_length: kernels.CudaKernels(max_length))
    return fake
