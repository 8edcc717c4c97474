"""Layers with pinned experts: `devices` has auto, cpu (never in a slot) or gpu (always) for each, or is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twofold.api.errors import ConfigError


def usable_slots(devices: Sequence[str], num_layers: int, num_experts: int) -> int:
    """Slots sufficient for every expert that may be in one."""
    return (num_layers - devices.count("cpu")) * num_experts


def check_pins(
    devices: Sequence[str], num_slots: int, num_layers: int, num_experts: int, is_placed: bool = False
) -> None:
    """Raises ConfigError if there are too few slots for the experts pinned to them, or if a strategy also places all
    experts (is_placed)."""
    if devices and is_placed:
        raise ConfigError(
            "--expert-placement-strategy places all experts and --optimize-config pins some; leave one of them out"
        )
    layers = devices.count("gpu")
    pinned = layers * num_experts
    if pinned <= num_slots:
        return
    ratio = math.ceil(1e3 * pinned / (num_layers * num_experts)) / 1e3
    raise ConfigError(
        f"--optimize-config pins {pinned} experts ({layers} layers of {num_experts}) to the GPU; there are {num_slots} "
        f"slots: give --gpu-experts-ratio of at least {ratio}, or pin fewer layers"
    )


def cpu_layers(devices: Sequence[str]) -> frozenset[int]:
    """Layers whose experts are never in a slot."""
    return frozenset(layer for layer, device in enumerate(devices) if device == "cpu")
