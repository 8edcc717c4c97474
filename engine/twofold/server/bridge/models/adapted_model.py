"""The model of a request that uses LoRA adapters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from twofold.api.errors import ModelLoadError
from twofold.api.types import LoadedAdapter
from twofold.server.bridge.models.protocol import AdapterParts, ServingAdapters
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.http.bodies import LoraScale
from twofold.server.http.errors import unavailable, wrong_field

_log = logging.getLogger("twofold.server")


def scales_by_name(model: ServedModel, scales: Sequence[LoraScale], param: str) -> dict[str, float]:
    """Scales by the adapters' names. ApiError 400 for an unknown id, or one that is given twice."""
    names = {each.number: name for name, each in model.adapters.items()}
    found: dict[str, float] = {}
    for each in scales:
        if each.id not in names:
            raise wrong_field(
                param, f"there is no adapter with the id {each.id}; GET /lora-adapters lists them"
            )
        if names[each.id] in found:
            raise wrong_field(param, f"the id {each.id} was given twice")
        found[names[each.id]] = each.scale
    return found


@contextlib.asynccontextmanager
async def adapted(
    model: ServedModel, name: str | None, scales: Sequence[LoraScale] | None
) -> AsyncIterator[ServedModel]:
    """The model as a request sees it that names `name`, with its adapters. They stay in memory inside the block.

    Files are read on a thread.

    Args:
        name: of the model or of an adapter; see `ServerState.find`.
        scales: adapters of the request, in place of the one named.

    Raises:
        ApiError: 400 for scales of unknown adapters, 503 if an adapter's files cannot be read again.
        CapacityError: all adapters in memory are in use.
    """
    engine = model.engine  # refuses while it loads or drains
    adapter_name = model.adapter_named(name)
    parts: AdapterParts
    if scales is not None:
        by_name = scales_by_name(model, scales, "lora")
        parts = tuple((each, by_name[each]) for each in model.adapters if by_name.get(each))
    else:
        parts = engine.adapters.scales if adapter_name is None else ((adapter_name, 1.0),)
    if not parts:
        yield model
        return
    held = await _held(engine.adapters, parts)
    try:
        yield model.with_adapter(adapter_name or model.name, held)
    finally:
        engine.adapters.release(held)


async def _held(adapters: ServingAdapters, parts: AdapterParts) -> LoadedAdapter:
    try:
        if (found := adapters.hold_loaded(parts)) is not None:
            return found
        reading = asyncio.ensure_future(asyncio.to_thread(adapters.hold, parts))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            # The thread cannot be interrupted: release what it will hold.
            reading.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else adapters.release(done.result())
            )
            raise
    except KeyError:
        raise unavailable("the adapter has just been unloaded", "adapter_unloaded", 1) from None
    except ModelLoadError as error:
        _log.warning("an adapter cannot be read again: %s", error)
        names = ", ".join(repr(name) for name, _ in parts)
        raise unavailable(
            f"the adapter {names} cannot be read again; the server's log has the reason",
            "adapter_load_failed",
            30,
        ) from None
