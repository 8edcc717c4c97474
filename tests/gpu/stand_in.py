"""The tests' fake device in the place of a card, for a rehearsal of the day: tiny shapes, times of the host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twofold.device import finding

from benchmarks.gpu.machine import REHEARSAL, Machine
from tests.device.conftest import built_module
from tests.device.fake_device import FakeDevice

_BYTES = 2 << 30


def _open() -> FakeDevice:
    fake: Any = built_module("twofold_fake")
    return FakeDevice(fake.open_device(0, total_bytes=_BYTES, tick_us=2.0))


def install() -> None:
    """Each look-up of a device in this process finds a new fake one."""
    finding.find_device = lambda index=0: (_open(), "")  # type: ignore[assignment]


def machine(models: Path) -> Machine:
    """The fake device for checks; commands run on another one each."""
    install()
    program = (sys.executable, "-m", "tests.gpu.worker", "--twofold", __name__)
    return Machine(_open(), models, REHEARSAL, program=program)
