"""Loss of an engine's device: its memory is abandoned, and the engine goes on with the CPU where that is allowed."""

from __future__ import annotations

import logging
from typing import Final

from twofold.api.errors import DeviceLostError, TwofoldError
from twofold.api.types import DeviceLoss
from twofold.device.finding import keep_for_ever
from twofold.engine.loading import EngineParts

_log = logging.getLogger(__name__)
_REMEDY: Final = "restart the process; --accelerator auto goes on with the CPU by itself"


def replace_device(
    parts: EngineParts, error: DeviceLostError
) -> tuple[EngineParts, DeviceLoss] | tuple[None, DeviceLoss]:
    """Load what `parts` held on the lost device into host memory.

    Returns:
        the parts to serve from, None if the process has to be restarted; and what became of the device.
    """
    keep_for_ever(parts)
    parts.kv_pages.close(save=False)
    reason = str(error)
    if parts.reload_on_cpu is None:
        _log.error("the device is lost: %s; %s", reason, _REMEDY)
        return None, DeviceLoss("failed", f"{reason}; {_REMEDY}")
    _log.error("the device is lost: %s; the model is loaded on the CPU", reason)
    try:
        made = parts.reload_on_cpu(reason)
    except (TwofoldError, MemoryError, RuntimeError, ValueError, OSError) as failure:
        _log.exception("the model could not be loaded on the CPU")
        why = f"{reason}; loading the model on the CPU failed ({failure}); restart the process"
        return None, DeviceLoss("failed", why)
    _log.warning("the model is served by the CPU from now on: %s", reason)
    return made, DeviceLoss("replaced", reason)


def refuse_if_lost(loss: DeviceLoss | None) -> None:
    """Raise DeviceLostError if the engine can compute nothing any more."""
    if loss is not None and loss.state == "failed":
        raise DeviceLostError(f"the device is lost: {loss.reason}")
