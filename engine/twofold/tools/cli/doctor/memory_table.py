"""Memory of a model at every context length, and the share of its experts that fits on a card: from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.placement_config import SLOT_FIELDS
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import ModelSize, measure_files
from twofold.weights.host_memory import available_memory_bytes

CARDS_GIB: Final = (8, 12, 16, 24, 32)
"""Common GPU memory sizes."""
_LEAST_CONTEXT: Final = 4096
_GIB: Final = 2**30


@dataclass(frozen=True)
class ContextNeeds:
    """One context length, totalled over all requests."""

    tokens: int
    kv_bytes: int
    host_bytes: int
    """Host memory, with all experts in it."""
    fits: bool
    """Whether this machine has that much available."""
    experts_on_card: dict[int, float | None]
    """Card's GiB → share of all experts that fit in slots; None: dense weights and KV cache do not fit."""


def contexts(longest: int) -> Iterator[int]:
    """Every fourth power of two from 4,096 up, then the model's longest context."""
    tokens = _LEAST_CONTEXT
    while tokens < longest:
        yield tokens
        tokens *= 4
    yield longest


def memory_table(files: ModelFiles, config: EngineConfig) -> list[ContextNeeds]:
    """A row per context length; KV cache type as `config` sets it on the host, the device's type on cards."""
    size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
    on_device = measure_files(files, kv_cache_dtype="bfloat16")
    available = available_memory_bytes()
    return [
        ContextNeeds(
            tokens=tokens,
            kv_bytes=size.kv_bytes_per_token * tokens,
            host_bytes=size.host_bytes(tokens),
            fits=size.host_bytes(tokens) <= available,
            experts_on_card={card: _share(on_device, tokens, card * _GIB, config) for card in CARDS_GIB},
        )
        for tokens in contexts(size.config.max_context)
    ]


def _share(size: ModelSize, tokens: int, card_bytes: int, config: EngineConfig) -> float | None:
    from twofold.device.memory.budget import plan_device
    from twofold.device.memory.needs import needs_of

    # Room for whole pages; no sizes are requested, so that the plan fills the card.
    open_slots: dict[str, Any] = dict.fromkeys(SLOT_FIELDS)
    requested = replace(config, max_total_tokens=max(tokens, config.page_size), **open_slots)
    try:
        budget = plan_device(requested, needs_of(size), card_bytes, card_bytes)
    except ConfigError:
        return None
    return budget.num_slots / budget.num_experts if budget.num_experts else 1.0


def render(rows: Sequence[ContextNeeds]) -> Iterator[str]:
    """The table as text lines."""
    cards = " ".join(f"{f'{card} GiB':>7}" for card in CARDS_GIB)
    yield f"{'':>9} {'':>10} {'':>11}  {'this':<7}  experts in VRAM of a card with"
    yield f"{'context':>9} {'KV cache':>10} {'memory':>11}  {'machine':<7}  {cards}"
    for row in rows:
        shares = " ".join(
            f"{'–' if share is None else f'{100 * share:.0f} %':>7}" for share in row.experts_on_card.values()
        )
        yield (
            f"{row.tokens:>9} {row.kv_bytes / _GIB:>6.2f} GiB {row.host_bytes / _GIB:>7.2f} GiB  "
            f"{'fits' if row.fits else 'no':<7}  {shares}"
        )
