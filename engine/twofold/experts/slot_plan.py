"""Shape of a model's routed part and the plan for it: slots, their policy, and the accelerator's other work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twofold import _core
from twofold.experts.device_split import split_slots
from twofold.experts.pins import check_pins
from twofold.experts.placement import PLACED_BY_POLICY, InitialPlacement, Mask
from twofold.experts.policies import POLICIES
from twofold.weights.weight_format import (
    Activation,
    ExpertFormats,
    LayerFormats,
    formats_by_expert,
    layer_formats,
)


@dataclass(frozen=True)
class MoeShape:
    """Shape of a model's routed part."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    formats: tuple[LayerFormats, ...]
    """Formats of each layer's experts."""
    activation: Activation = "silu"
    biases: bool = False
    """Whether gate, up and down have biases."""
    limits: tuple[float, ...] = ()
    """Bound of gate and up of each layer, 0 for none; empty: none has one."""
    second_half: int = 0
    """As `RoutedShape.second_half`."""

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """As those of `RoutedShape`."""
        return (self.intermediate, self.second_half) if self.second_half else (self.intermediate,)

    @property
    def of_text(self) -> MoeShape:
        """The same without experts of pictures."""
        if not self.second_half:
            return self
        count = self.num_experts // 2
        formats = (formats_by_expert(each, self.num_experts)[:count] for each in self.formats)
        return replace(
            self, num_experts=count, second_half=0, formats=tuple(layer_formats(each) for each in formats)
        )

    @property
    def usual(self) -> ExpertFormats:
        """Formats of most experts."""
        if not self.formats:
            return "f32", "f32", "f32"  # a dense model: not read
        counts: Counter[ExpertFormats] = Counter()
        for of_layer in self.formats:
            counts.update(formats_by_expert(of_layer, self.num_experts))
        (most, _), *_ = counts.most_common(1)
        return most

    @property
    def format(self) -> str:
        """`usual`, as used for curves and display: "q4_0", or "q4_k/q4_k/q6_k" if matrices differ."""
        return self.usual[0] if len(set(self.usual)) == 1 else "/".join(self.usual)


@dataclass(frozen=True)
class DenseCost:
    """The accelerator's other work: entry i runs before MoE layer i, the last one after the last MoE layer."""

    bytes: list[float]
    flops_per_token: list[float]
    router_bytes: float = 0.0
    """Bytes of one router's gate, which a prediction reads a second time."""
    on_cpu: tuple[list[float], list[float], list[float]] = ([], [], [])
    """CPU part of each stretch, excluded from the figures above: bytes, operations of a token, and number of transfers
    of the residual stream. Empty: none."""

    def native(self) -> _core.DenseCost:
        """The same for the native executor."""
        cpu_bytes, cpu_flops, handovers = self.on_cpu
        return _core.DenseCost(
            bytes=self.bytes,
            flops_per_token=self.flops_per_token,
            router_bytes=self.router_bytes,
            cpu_bytes=cpu_bytes,
            cpu_flops_per_token=cpu_flops,
            handovers=handovers,
        )


@dataclass(frozen=True)
class SlotPlan:
    """VRAM for experts, and how its contents are chosen."""

    num_slots: int
    policy: str
    prefetch: bool = False
    num_staging: int = -1
    """Staging slots for fetched experts; -1: room for one whole layer."""
    placement: InitialPlacement = PLACED_BY_POLICY
    """Initial contents; permanent if static."""
    dynamic_update_from: int = 0
    """Prompt tokens of a step from which it updates a static placement; 0: never."""
    num_deferred: int = 0
    """Maximum number of a generated token's CPU experts deferred to the next MoE layer; or `output_changes.AUTO`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the layer scheduler by name (`_core.scheduler_options`), such as another engine's rules."""
    split: tuple[float, ...] = ()
    """Share of the slots of each device of a machine with several; empty: one device."""
    homes: tuple[int, ...] = ()
    """For each layer the device with its dense weights; empty: device 0."""
    devices: tuple[str, ...] = ()
    """Pinning of each layer's experts: auto, cpu (never in a slot), gpu (always in one); empty: all are auto."""

    def scheduler_config(self, shape: MoeShape) -> _core.SchedulerConfig:
        """The core's scheduler configuration. Raises ConfigError as `check_pins`."""
        check_pins(
            self.devices,
            self.num_slots,
            shape.num_layers,
            shape.num_experts,
            is_placed=self.placement.is_static,
        )
        rules: dict[str, Any] = {"policy": self.policy}
        if self.placement.is_static:  # one pool: layers may have uneven shares of it
            rules = {"policy": "static", "shared_pool": True, "fixed_placement": True}
            if 0 < self.num_slots < shape.num_layers * shape.num_experts:
                rules["replace_from"] = self.dynamic_update_from
        return _core.SchedulerConfig(
            shape.num_layers,
            shape.num_experts,
            shape.top_k,
            self.device_slots(shape),
            homes=self.homes,
            prefetch=self.prefetch,
            num_staging=self.num_staging,
            pins=self.devices,
            num_deferred=self.num_deferred,
            **(rules | dict(self.options)),
        )

    def device_slots(self, shape: MoeShape) -> list[int]:
        """Slots of each device."""
        most = max(self.num_slots, shape.num_layers * shape.num_experts)
        return split_slots(self.num_slots, self.split or (1.0,), most)

    @property
    def cache_prior(self) -> float:
        """Strength of the routing bias towards experts in slots, 0 to below 1."""
        return float(self.options.get("cache_prior", 0.0))

    def with_options(self, **options: Any) -> SlotPlan:
        """The same plan with other options of the layer scheduler."""
        return replace(self, options={**self.options, **options})

    @property
    def changes_outputs(self) -> bool:
        """Whether experts are deferred or routers prefer experts in slots; see `output_changes`."""
        return self.num_deferred > 0 or self.cache_prior > 0

    def mask(self, shape: MoeShape) -> Mask | None:
        """Initial contents of the slots; None: nothing, or only pinned experts."""
        if self.devices:
            return None
        return self.placement.mask(
            shape.num_layers, shape.num_experts, self.num_slots, is_pool=POLICIES[self.policy].pooled
        )
