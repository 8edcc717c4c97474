"""Failed steps, and the loss of an engine's device: its memory is abandoned, and the CPU takes over where allowed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from twofold.api.errors import CapacityError, DeviceLostError, TwofoldError, UnusableEngineError
from twofold.api.types import EngineFailure
from twofold.device.finding import keep_for_ever
from twofold.engine.loading import EngineParts

_log = logging.getLogger(__name__)
_REMEDY: Final = "restart the process; --accelerator auto goes on with the CPU by itself"


def device_failure(parts: EngineParts, error: DeviceLostError) -> EngineFailure:
    """Consequence of a lost device for an engine: its model is loaded again, or nothing can be computed."""
    if parts.reload_on_cpu is None:
        return EngineFailure("failed", f"{error}; {_REMEDY}")
    return EngineFailure("reloading", str(error))


def replace_device(
    parts: EngineParts, error: DeviceLostError
) -> tuple[EngineParts, EngineFailure] | tuple[None, EngineFailure]:
    """Load what `parts` held on the lost device into host memory.

    Returns:
        the parts to serve from, None if the process has to be restarted; and what became of the device.
    """
    keep_for_ever(parts)
    parts.kv_pages.close(save=False)
    reason = str(error)
    if parts.reload_on_cpu is None:
        _log.error("the device is lost: %s; %s", reason, _REMEDY)
        return None, device_failure(parts, error)
    _log.error("the device is lost: %s; the model is loaded on the CPU", reason)
    try:
        made = parts.reload_on_cpu(reason)
    except (TwofoldError, MemoryError, RuntimeError, ValueError, OSError) as failure:
        _log.exception("the model could not be loaded on the CPU")
        why = f"{reason}; loading the model on the CPU failed ({failure}); restart the process"
        return None, EngineFailure("failed", why)
    _log.warning("the model is served by the CPU from now on: %s", reason)
    return made, EngineFailure("replaced", reason)


def error_of(failure: EngineFailure | None) -> UnusableEngineError | None:
    """The error of every request if the engine can compute nothing any more; None while it can."""
    if failure is None or failure.state != "failed":
        return None
    return UnusableEngineError(f"no request can be computed: {failure.reason}", code=failure.code)


def raise_if_unusable(failure: EngineFailure | None) -> None:
    """Raise `error_of` the failure, if there is one."""
    if (error := error_of(failure)) is not None:
        raise error


def step_failed(number: int, error: Exception, memory_advice: Sequence[str]) -> EngineFailure | None:
    """Log why a step failed, with a traceback for a bug, and which settings to lower if memory was short.

    Returns:
        the failure of the engine itself; None if the next step may succeed.
    """
    lacks_memory = isinstance(error, MemoryError | CapacityError)
    advice = "".join(f"\n{line}" for line in memory_advice) if lacks_memory else ""
    is_bug = not isinstance(error, TwofoldError)
    shows_trace = is_bug or _log.isEnabledFor(logging.DEBUG)
    _log.error(
        "step %d failed; its requests end with an error: %s%s", number, error, advice, exc_info=shows_trace
    )
    return EngineFailure("failed", str(error), error.code) if isinstance(error, UnusableEngineError) else None
