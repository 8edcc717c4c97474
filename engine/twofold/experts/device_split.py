"""Expert slots of several devices: how many each has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.experts.profiles import MachineProfile


def parse_split(text: str) -> tuple[float, ...]:
    """Shares from text such as "3,1". Raises ConfigError."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) <= 0:
        raise ConfigError(f"--tensor-split was given {text!r}; expected one share per device, such as 3,1")
    return tuple(share / sum(shares) for share in shares)


def requested_split(text: str | None, names: Sequence[str]) -> tuple[float, ...]:
    """Shares of --tensor-split for the devices of these names; empty if it is None. ConfigError: not one share each."""
    if text is None:
        return ()
    shares = parse_split(text)
    if len(shares) != len(names):
        raise ConfigError(
            f"--tensor-split {text} has {len(shares)} shares; the machine has {len(names)} devices "
            f"({', '.join(names)}); give one share for each, in this order"
        )
    return shares


def device_split(text: str | None, profile: MachineProfile) -> tuple[float, ...]:
    """Share of the expert slots of each device of the machine, first device first.

    text: --tensor-split; None: in proportion to VRAM, evenly where a profile does not say how much there is.

    Raises:
        ConfigError: not one share per device.
    """
    devices = profile.devices
    if shares := requested_split(text, [device.name for device in devices]):
        return shares
    sizes = [device.figures["vram_gb"].value for device in devices if "vram_gb" in device.figures]
    if len(sizes) < len(devices):
        sizes = [1.0] * len(devices)
    return tuple(size / sum(sizes) for size in sizes)


def split_slots(num_slots: int, shares: Sequence[float], most: int) -> list[int]:
    """`num_slots` slots by share, at most `most` for each device; what does not divide goes to the first devices."""
    slots = [min(most, math.floor(num_slots * share + 1e-9)) for share in shares]
    for device, _ in enumerate(slots):
        slots[device] += max(0, min(num_slots - sum(slots), most - slots[device])) if shares[device] else 0
    return slots


def check_devices(config: EngineConfig, num_devices: int) -> None:
    """Refuse a split where there is nothing to split.

    Raises:
        ConfigError: names the setting and what to do.
    """
    if num_devices < 2 and config.tensor_split is not None:
        raise ConfigError(
            f"--tensor-split {config.tensor_split} was given with one device; leave it out, or name several "
            "devices, such as --devices cuda:0,cuda:1 or --accelerator emulated:rtx4090-pcie4+rtx3060-pcie3"
        )
