"""Settings of expert placement: a base of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from twofold.api.core_tables import SCHEDULER_OPTIONS
from twofold.api.errors import ConfigError
from twofold.api.settings import Checked, check, flag_name, setting

RECORDER_MODES: Final = ("stat", "stat_approx", "per_pass", "per_token")
"""Modes of the expert distribution recorder, with SGLang's names."""
SLOT_FIELDS: Final = ("gpu_experts_ratio", "num_gpu_experts", "moe_cache_mib")
"""Settings that give the number of expert slots, each in its own unit."""

BY_POLICY: Final = "payback"
"""The strategy in which a cache policy decides which experts move into VRAM."""


def scheduler_option(name: str) -> Any:
    """Setting of an option of the layer scheduler, with the core's default, range and help."""
    return setting(**SCHEDULER_OPTIONS[name], scheduler_option=True)


_STRATEGIES: Final = (BY_POLICY, "uniform", "frequency", "front-loading", "random")


@dataclass(frozen=True)
class PlacementConfig(Checked):
    """Expert placement: which experts may live on the accelerator, and what decides it.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    accelerator: str = setting(
        "auto",
        "device that runs experts beside the CPU: auto (cuda if there is a GPU, else none), cuda, none, or "
        "emulated:PROFILE, a GPU emulated by the CPU on a virtual clock (PROFILE+PROFILE: several GPUs in one machine)",
    )
    devices: str | None = setting(
        None,
        "GPUs of --accelerator cuda, such as cuda:0,cuda:1; all hold experts, the first one the first layers and the "
        "head (default: cuda:0)",
    )
    split_mode: str = setting(
        "layer",
        "layer: use all GPUs of --devices; none: use one of them alone, --main-gpu",
        choices=("layer", "none"),
    )
    gpu_self_check: bool = setting(
        True,
        "compare a GPU's results with the CPU's for two seconds before the model is loaded; off: only after a report "
        "has shown that the check is wrong",
    )
    main_gpu: int = setting(
        0, "position in --devices of the GPU that comes first, or is used alone (--split-mode none)", low=0
    )
    tensor_split: str | None = setting(
        None,
        "share of the expert slots of each device, such as 3,1, in the order of --devices, or fastest emulated device "
        "first; only with several devices (default: in proportion to the VRAM left for experts)",
    )
    gpu_experts_ratio: float | None = setting(
        None,
        "share of all experts that fit into VRAM slots (default: 0.25, or what VRAM allows)",
        low=0.0,
        high=1.0,
    )
    num_gpu_experts: int | None = setting(
        None, "expert slots per layer, on average; --gpu-experts-ratio overrides it", low=0
    )
    expert_placement_strategy: str = setting(
        "payback",
        "what fills the VRAM slots: payback (--policy decides all the time), or a static placement: uniform (the first "
        "experts of each layer), frequency (the most used experts of --init-expert-location), front-loading (all "
        "experts of the first layers), random (seed 42)",
        choices=_STRATEGIES,
    )
    init_expert_location: str | None = setting(
        None,
        "file of expert statistics (.npz of Twofold or .pt of SGLang's recorder); required by frequency, and the warm "
        "start of payback",
    )
    enable_dynamic_expert_update: bool = setting(
        False,
        "let each long prefill re-place the experts of a static strategy by its own routing, layer by layer",
    )
    gpu_prefill_token_threshold: int = setting(
        256, "smallest number of prompt tokens in a step that triggers --enable-dynamic-expert-update", low=2
    )
    moe_cache_mib: int | None = setting(
        None, "MiB of VRAM for expert slots, without staging slots; replaces --gpu-experts-ratio", low=0
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of GPU memory for dense weights, KV cache and expert slots together", low=0.05, high=1.0
    )
    machine_profile: str | None = setting(
        None,
        "calibrated figures of this machine for predictions (default: the result of `twofold calibrate`)",
    )
    policy: str = setting("payback", "cache policy: which experts stay in VRAM")
    prefetch: str = setting(
        "auto",
        "upload experts that the next layer's router predicts while decoding: auto (on for policies with a price for "
        "uploads; off on a GPU), on, off; never changes outputs",
        choices=("auto", "on", "off"),
    )
    optimize_config: str | None = setting(
        None,
        "YAML file of placement rules: device, format and threads of each module's experts "
        "(docs/guides/placement-rules.md); shipped = the rules shipped for the model's family",
    )
    num_deferred_experts: str = setting(
        "0",
        "defer up to N of each token's lowest-weighted CPU experts to the next MoE layer, so that CPU and GPU overlap "
        "(decode only, two experts stay immediate); changes outputs; 0 = off, auto = fewest that keep the CPU busy "
        "(docs/explanation/deferral.md)",
    )
    cache_prior: float = scheduler_option("cache_prior")
    cache_state: str | None = setting(
        None, "file with the learned state of the expert cache: read at start if it exists, written at exit"
    )
    record_gpu_expert_distribution: bool = setting(
        False, "record from the start which experts are used and which run on the GPU; written at exit"
    )
    expert_distribution_recorder_mode: str = setting(
        "stat",
        "content of a recording: stat (use counts), stat_approx (use counts of every 8th step), per_pass (of each "
        "step), per_token (of each token)",
        choices=RECORDER_MODES,
    )
    expert_distribution_recorder_dir: str = setting(
        ".",
        "directory for recordings; also SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
        also="SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
    )
    expert_distribution_recorder_buffer_size: int = setting(
        1000,
        "steps kept by modes per_pass and per_token (at most 256 MiB); older steps are dropped",
        low=1,
        high=10**6,
    )

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Values of those settings that are options of the layer scheduler."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["scheduler_option"]}

    def __post_init__(self) -> None:
        super().__post_init__()
        others = [name for name in SLOT_FIELDS[:-1] if getattr(self, name) is not None]
        if self.moe_cache_mib is not None and others:
            raise ConfigError(f"{flag_name(others[0])} and --moe-cache-mib were both given; give one of them")
        check(self.optimize_config != "", "optimize_config", self.optimize_config, "a rule file, or shipped")
        is_number = self.num_deferred_experts == "auto" or self.num_deferred_experts.isdecimal()
        check(is_number, "num_deferred_experts", self.num_deferred_experts, "auto, or 0 or more")
