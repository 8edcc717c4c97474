"""Values of live control: how memory is split, and which experts are in slots. Imports no other Twofold module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class MemorySplit:
    """How memory is split between experts and sequence state."""

    num_slots: int
    """Expert slots over all layers."""
    num_staging: int
    """Staging slots for fetched experts; -1: room for one whole layer."""
    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""


@dataclass(frozen=True)
class Resize:
    """A requested memory split, in the terms of `EngineConfig`; None leaves a value unchanged."""

    gpu_experts_ratio: float | None = None
    num_gpu_experts: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Memory by use, in bytes where the name says so."""

    num_slots: int
    slots_bytes: int
    """Expert slots including staging; in host memory where the device is emulated."""
    num_pages: int
    page_bytes: int
    """Bytes per page, all layers."""
    page_size: int
    """Tokens per page."""
    num_free_pages: int
    """Pages that no running sequence uses, cached pages included."""
    num_cached_pages: int
    """Pages in the prefix cache, including those that running sequences use."""
    num_snapshots: int
    """Records in the prefix cache."""
    record_bytes: int
    """Bytes per record, all layers."""
    max_context: int


class LayerPlacement(NamedTuple):
    """Which experts of one MoE layer are in slots."""

    layer: int
    """Index among MoE layers."""
    num_resident: int
    experts: tuple[tuple[int, str, float], ...]
    """(expert, "resident", "in flight" or "absent", worth by the policy), highest worth first."""


class ExpertPlacement(NamedTuple):
    """Which experts are in slots, and what placed them."""

    resident: tuple[tuple[int, ...], ...]
    """Resident experts per MoE layer, ascending."""
    num_experts: int
    """Experts per layer."""
    num_slots: int
    strategy: str
    policy: str
    is_static: bool
    """Whether the placement is fixed: no policy moves experts."""
    dynamic_update: Mapping[str, int]
    """Steps with prompt tokens by outcome of the update."""
    devices: tuple[str, ...] = ()
    """Names of a machine's devices, if it has several."""
    held_by: tuple[tuple[int, ...], ...] = ()
    """Device of each expert in `resident`, if there are several."""
