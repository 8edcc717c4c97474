"""Settings of where experts run: a base of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ConfigError
from twofold.api.settings import check, flag_name, setting

RECORDER_MODES: Final = ("stat", "stat_approx", "per_pass", "per_token")
"""Of recordings of routed experts, by SGLang's words."""
SLOT_FIELDS: Final = ("gpu_experts_ratio", "num_gpu_experts", "moe_cache_mib")
"""Which say how many expert slots there are, each in its own way."""

BY_POLICY: Final = "payback"
"""The strategy under which experts move as a cache policy finds it worth."""

_STRATEGIES: Final = (BY_POLICY, "uniform", "frequency", "front-loading", "random")


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
        None, "expert slots per layer, on average; --gpu-experts-ratio overrides it"
    )
    expert_placement_strategy: str = setting(
        "payback",
        "what fills the slots: payback (what --policy finds worth it, always), or once and for good: uniform (the "
        "first experts of each layer), frequency (the most routed of --init-expert-location), front-loading (the "
        "first layers), random (seed 42)",
    )
    init_expert_location: str | None = setting(
        None,
        "file of expert statistics (our .npz, or the .pt of SGLang's recorder): what frequency goes by, and what "
        "payback starts from",
    )
    enable_dynamic_expert_update: bool = setting(
        False,
        "let long prompts place experts anew by their own routing, layer by layer while they are computed; for the "
        "strategies that are static otherwise",
    )
    gpu_prefill_token_threshold: int = setting(
        256, "prompt tokens of a step from which --enable-dynamic-expert-update acts"
    )
    moe_cache_mib: int | None = setting(
        None, "MiB of VRAM for expert slots, staging slots beside them; instead of --gpu-experts-ratio"
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
    optimize_config: str | None = setting(
        None,
        "YAML file of rules for modules: where their experts may be, in which format, on how many threads "
        "(docs/placement-rules.md); shipped: those of the model's family",
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

    record_gpu_expert_distribution: bool = setting(
        False,
        "record from the start which experts are routed to and which of them run on the GPU, and write it at the end",
    )
    expert_distribution_recorder_mode: str = setting(
        "stat",
        "what a recording of routed experts holds: stat (how often each was routed to), stat_approx (the same of every "
        "8th step), per_pass (of each step), per_token (of each token)",
    )
    expert_distribution_recorder_dir: str = setting(
        ".",
        "directory that recordings of routed experts are written to; also SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
        also="SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
    )
    expert_distribution_recorder_buffer_size: int = setting(
        1000, "steps that modes per_pass and per_token keep, 256 MiB at most; beyond, the oldest go"
    )

    def __post_init__(self) -> None:
        check(self.gpu_experts_ratio is None or 0.0 <= self.gpu_experts_ratio <= 1.0,
               "gpu_experts_ratio", self.gpu_experts_ratio, "a number from 0.0 to 1.0")  # fmt: skip
        check(self.num_gpu_experts is None or self.num_gpu_experts >= 0,
               "num_gpu_experts", self.num_gpu_experts, "0 or more")  # fmt: skip
        check(0.05 <= self.gpu_memory_utilization <= 1.0,
               "gpu_memory_utilization", self.gpu_memory_utilization, "a number from 0.05 to 1.0")  # fmt: skip
        check(self.moe_cache_mib is None or self.moe_cache_mib >= 0,
               "moe_cache_mib", self.moe_cache_mib, "0 or more")  # fmt: skip
        others = [name for name in SLOT_FIELDS[:-1] if getattr(self, name) is not None]
        if self.moe_cache_mib is not None and others:
            raise ConfigError(f"{flag_name(others[0])} and --moe-cache-mib were both given; give one of them")
        check(self.expert_placement_strategy in _STRATEGIES, "expert_placement_strategy",
               self.expert_placement_strategy, f"one of {', '.join(_STRATEGIES)}")  # fmt: skip
        check(self.gpu_prefill_token_threshold >= 2, "gpu_prefill_token_threshold",
               self.gpu_prefill_token_threshold, "2 or more")  # fmt: skip
        check(self.optimize_config != "", "optimize_config", self.optimize_config, "a rule file, or shipped")
        check(self.num_deferred_experts == "auto" or self.num_deferred_experts.isdecimal(),
               "num_deferred_experts", self.num_deferred_experts, "auto, or 0 or more")  # fmt: skip
        check(0.0 <= self.cache_prior <= 0.9, "cache_prior", self.cache_prior, "a number from 0.0 to 0.9")
        check(self.prefetch in ("auto", "on", "off"), "prefetch", self.prefetch, "auto, on or off")
        check(self.expert_distribution_recorder_mode in RECORDER_MODES, "expert_distribution_recorder_mode",
               self.expert_distribution_recorder_mode, ", ".join(RECORDER_MODES))  # fmt: skip
        check(1 <= self.expert_distribution_recorder_buffer_size <= 10**6, "expert_distribution_recorder_buffer_size",
               self.expert_distribution_recorder_buffer_size, "a whole number from 1 to 1000000")  # fmt: skip
