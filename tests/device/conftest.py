"""The fake device: a module that the source tree's build leaves beside the native test programs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(os.environ.get("TWOFOLD_BUILD_DIR") or Path(__file__).resolve().parents[2] / "build")
BUILT = BUILD / "dev/tests/device"


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    name = os.environ.get("TWOFOLD_FAKE", "twofold_fake")
    if not list(BUILT.glob(f"{name}.*.so")) and os.environ.get("TWOFOLD_TESTS_NEED_ALL") != "1":
        pytest.skip("the fake device is not built beside these sources")
    sys.path.insert(0, str(BUILT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BUILT))
