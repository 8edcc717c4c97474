"""Which accelerator runs experts besides the CPU, and why: `cuda`, `emulated:PROFILE` or `none`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import Clock
from twofold.experts.profiles import MachineProfile, load_profile, shipped_profiles

DEFAULT_EXPERTS_RATIO = 0.25


@dataclass(frozen=True)
class AcceleratorChoice:
    """What was chosen and the reason, which is logged and kept with the run."""

    kind: Literal["cuda", "emulated", "none"]
    reason: str
    profile: MachineProfile | None = None

    @property
    def label(self) -> str:
        """How the accelerator is called everywhere it is shown, e.g. "emulated:rtx4090-pcie4"."""
        return f"emulated:{self.profile.name}" if self.profile else self.kind

    @property
    def clock(self) -> Clock:
        return "virtual" if self.kind == "emulated" else "wall"


def choose_accelerator(name: str) -> AcceleratorChoice:
    """Resolve `--accelerator`. Nothing is emulated unless asked for.

    Raises:
        ConfigError: unknown name, or cuda was asked for and is not there.
    """
    if name.startswith("emulated:"):
        profile = load_profile(name.removeprefix("emulated:"))
        return AcceleratorChoice("emulated", f"asked for; times are those of {profile.description}", profile)
    if name == "none":
        return AcceleratorChoice("none", "asked for")
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"--accelerator was given {name!r}; it takes auto, cuda, none or emulated:PROFILE with PROFILE one of "
            f"{', '.join(shipped_profiles())}"
        )
    module, missing = find_cuda()
    if module is not None:
        return AcceleratorChoice("cuda", "a CUDA device is there")
    if name == "cuda":
        raise ConfigError(f"--accelerator cuda: {missing}; use auto, none or emulated:PROFILE")
    return AcceleratorChoice("none", missing)


def num_slots(config: EngineConfig, num_layers: int, num_experts: int) -> int:
    """Expert slots over all layers that the configuration asks for.

    Raises:
        ConfigError: more slots per layer than there are experts.
    """
    if config.num_gpu_experts is not None:
        if config.num_gpu_experts > num_experts:
            raise ConfigError(
                f"--num-gpu-experts was given {config.num_gpu_experts}; the model has {num_experts} experts per layer"
            )
        return config.num_gpu_experts * num_layers
    ratio = DEFAULT_EXPERTS_RATIO if config.gpu_experts_ratio is None else config.gpu_experts_ratio
    return round(ratio * num_layers * num_experts)


def find_cuda() -> tuple[Any, str]:
    """The CUDA module and "", or None and why there is no device to use."""
    try:
        cuda: Any = importlib.import_module("twofold._cuda")
    except ImportError:
        return None, "this build has no CUDA module"
    if cuda.device_count() == 0:
        return None, "no CUDA device was found"
    if not cuda.host_addressable:
        import torch  # which computes the dense layers; slow to import, so only where there is a device

        if not torch.cuda.is_available():
            return None, f"torch {torch.__version__} does not use CUDA; install one that does"
    return cuda, ""
