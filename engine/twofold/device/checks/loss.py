"""Decides whether a device is lost: after an error of a step, a device that still copies correctly gets another chance.

After most CUDA errors every later call of the process fails as well, so that one copy tells them apart from an error
that ended one step alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twofold.api.errors import DeviceLostError
from twofold.device.checks.copies import copy_both_ways
from twofold.device.checks.running import SHORT, Check, run_checks
from twofold.device.device import Device
from twofold.device.sampler import NOT_FINITE

_MOST_FAILED_STEPS: Final = 2


def raise_if_lost(devices: Sequence[Device], error: Exception, num_failed: int) -> None:
    """Raise DeviceLostError if a device does not copy correctly any more, or if this many steps in a row failed.

    error: of the last step.
    """
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if num_failed >= _MOST_FAILED_STEPS:
        raise DeviceLostError(f"{num_failed} steps in a row failed; the last one: {reason}") from error
    checks = [Check("copy", functools.partial(copy_both_ways, device)) for device in devices]
    failed = next((result for result in run_checks(checks, SHORT) if result.state != "passed"), None)
    if failed is not None:
        raise DeviceLostError(f"a step failed ({reason}), and then a copy ({failed.problem})") from error


def finite_tokens(tokens: list[int]) -> list[int]:
    """The same tokens of `DeviceSampler.pick`. Raises DeviceLostError for one of logits with a NaN or an infinity."""
    if NOT_FINITE in tokens:
        raise DeviceLostError("logits hold a NaN or an infinity")
    return tokens


def finite_rows(rows: Tensor) -> npt.NDArray[np.float32]:
    """The rows on the host. Raises DeviceLostError for a NaN or an infinity."""
    found: npt.NDArray[np.float32] = rows.cpu().numpy()
    if not np.isfinite(found.sum(dtype=np.float64)):
        raise DeviceLostError("results of the model hold a NaN or an infinity")
    return found
