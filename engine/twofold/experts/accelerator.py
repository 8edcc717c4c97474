"""Accelerator that runs experts besides the CPU (`cuda`, `emulated:PROFILE` or `none`), and its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import Clock
from twofold.experts.profiles import MachineProfile

DEFAULT_EXPERTS_RATIO = 0.25


class ExpertDevice(Protocol):
    """A native device that can hold experts in slots."""

    def accelerator(
        self,
        store: _core.ExpertStore,
        cost: _core.CostModel,
        config: _core.SchedulerConfig,
        others: Sequence[Any] = (),
    ) -> _core.DeviceAccelerator:
        """Allocate slots here and on `others`; pin the store if possible. CapacityError, KernelError."""


@dataclass(frozen=True)
class AcceleratorChoice:
    """The chosen accelerator and the reason, which is logged and kept with the run."""

    kind: Literal["cuda", "emulated", "none"]
    reason: str
    profile: MachineProfile | None = None
    open_devices: Callable[[], Sequence[ExpertDevice]] | None = None
    """Opens the devices, for kind "cuda"."""
    devices: tuple[str, ...] = ()
    """Names of the devices, for kind "cuda": "cuda:0"."""
    unused_gpu: bool = False
    """For kind "none": the machine has a GPU, and `reason` says why it is not used."""

    @property
    def label(self) -> str:
        """Display name, e.g. "emulated:rtx4090-pcie4", "cuda" or "cuda:0+cuda:1"."""
        if self.profile:
            return f"emulated:{self.profile.name}"
        return "+".join(self.devices) if len(self.devices) > 1 else self.kind

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the machine's devices if it has several, first device first."""
        names = tuple(device.name for device in self.profile.devices) if self.profile else self.devices
        return names if len(names) > 1 else ()

    @property
    def clock(self) -> Clock:
        return "virtual" if self.kind == "emulated" else "wall"


def num_slots(config: EngineConfig, num_layers: int, num_experts: int, slot_bytes: int) -> int:
    """Number of expert slots of `slot_bytes` each, over all layers, that the configuration requests.

    Raises:
        ConfigError: more slots per layer than there are experts.
    """
    if config.num_gpu_experts is not None and config.gpu_experts_ratio is None:
        if config.num_gpu_experts > num_experts:
            raise ConfigError(
                f"--num-gpu-experts was given {config.num_gpu_experts}; the model has {num_experts} experts per layer"
            )
        return config.num_gpu_experts * num_layers
    if config.moe_cache_mib is not None:
        return slots_of_mib(config.moe_cache_mib, num_layers * num_experts, slot_bytes)
    ratio = DEFAULT_EXPERTS_RATIO if config.gpu_experts_ratio is None else config.gpu_experts_ratio
    return round(ratio * num_layers * num_experts)


def slots_of_mib(mib: int, num_experts: int, slot_bytes: int) -> int:
    """Whole slots in `mib` MiB; at most the number of experts in all layers."""
    return min(mib * 2**20 // slot_bytes, num_experts)
