"""Settings of where experts run: a base of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.api.errors import ConfigError
from twofold.api.settings import check, setting


@dataclass(frozen=True)
class PlacementConfig:
    """Which experts may live on the accelerator, and who decides.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    accelerator: str = setting(
        "auto",
        "auto (cuda if there is one, else none), cuda, none, or emulated:PROFILE for a GPU that is played by the CPU "
        "on a virtual clock",
    )
    gpu_experts_ratio: float | None = setting(
        None, "share of all experts that fit into VRAM slots, 0.0-1.0 (default: 0.25, or what VRAM allows)"
    )
    num_gpu_experts: int | None = setting(
        None, "expert slots per layer, on average; instead of --gpu-experts-ratio"
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU's memory that dense weights, KV cache and expert slots may take together, 0.05-1.0",
    )
    machine_profile: str | None = setting(
        None,
        "figures of this machine, by which layer times are predicted (default: what `twofold calibrate` stored)",
    )
    policy: str = setting(
        "payback", "cache policy: which experts stay in VRAM (`twofold serve --help` explains each)"
    )
    prefetch: str = setting(
        "auto",
        "upload experts that the next layer's router foresees, while decoding: auto (under policies that can "
        "weigh it; not on a GPU), on, off; never changes an answer",
    )
    num_deferred_experts: str = setting(
        "0",
        "changes answers: in decode, of so many least weighted experts of a token those that run on the CPU join the "
        "next MoE layer's output instead of this one's, so that the CPU works while the accelerator goes on; two stay "
        "immediate; auto: the fewest that keep the CPU busy; 0: none (docs/deferral.md)",
    )
    cache_prior: float = setting(
        0.0,
        "changes answers: in decode, an expert in a VRAM slot is chosen instead of another one whose score is not "
        "higher than its own divided by 1 minus this; 0.0 (off) to 0.9 (docs/deferral.md)",
    )
    cache_state: str | None = setting(
        None,
        "file that keeps what the expert cache has learned: read at the start if it is there, written at the end",
    )

    def __post_init__(self) -> None:
        check(self.gpu_experts_ratio is None or 0.0 <= self.gpu_experts_ratio <= 1.0,
               "gpu_experts_ratio", self.gpu_experts_ratio, "a number from 0.0 to 1.0")  # fmt: skip
        check(self.num_gpu_experts is None or self.num_gpu_experts >= 0,
               "num_gpu_experts", self.num_gpu_experts, "0 or more")  # fmt: skip
        check(0.05 <= self.gpu_memory_utilization <= 1.0,
               "gpu_memory_utilization", self.gpu_memory_utilization, "a number from 0.05 to 1.0")  # fmt: skip
        if self.gpu_experts_ratio is not None and self.num_gpu_experts is not None:
            raise ConfigError("--gpu-experts-ratio and --num-gpu-experts were both given; give one of them")
        check(self.num_deferred_experts == "auto" or self.num_deferred_experts.isdecimal(),
               "num_deferred_experts", self.num_deferred_experts, "auto, or 0 or more")  # fmt: skip
        check(0.0 <= self.cache_prior <= 0.9, "cache_prior", self.cache_prior, "a number from 0.0 to 0.9")
        check(self.prefetch in ("auto", "on", "off"), "prefetch", self.prefetch, "auto, on or off")
