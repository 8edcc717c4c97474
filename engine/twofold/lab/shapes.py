"""Sizes of models that have public routing traces, for turning a profile into prices and times.

Only what the cost model needs: bytes and flops of an expert, bytes read for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.profiles import MachineProfile
from twofold.lab.trace import Trace


@dataclass(frozen=True)
class ModelShape:
    """hidden and intermediate are of one expert (gate, up, down); bytes are as stored."""

    name: str
    hidden: int
    intermediate: int
    bits_per_weight: float
    dense_bytes_per_layer: float
    """Attention, router, norms, shared experts."""
    head_bytes: float
    """Final norm and output projection; the embedding reads one row."""
    routing: tuple[int, int, int]
    """MoE layers, experts per layer, experts per token."""

    @property
    def expert_bytes(self) -> float:
        return 3 * self.hidden * self.intermediate * self.bits_per_weight / 8

    @property
    def flops_per_token(self) -> float:
        return 6.0 * self.hidden * self.intermediate

    def cost_model(self, profile: MachineProfile) -> _core.CostModel:
        machine = _core.MachineProfile.from_fields(profile.name, profile.cost_figures)
        return _core.CostModel(machine, self.expert_bytes, self.flops_per_token)

    def dense_us(self, profile: MachineProfile, num_layers: int) -> list[float]:
        """Time of the dense stretches of one decode step: before each MoE layer, and after the last."""
        figures = profile.cost_figures
        launch, rate = figures["gpu_launch_us"], figures["vram_bandwidth_gbps"] * 1e3
        layer = launch + self.dense_bytes_per_layer / rate
        return [layer] * num_layers + [launch + self.head_bytes / rate]

    def dense_token_us(self, profile: MachineProfile, num_layers: int) -> list[float]:
        """Time of each token of a prompt in the same stretches where arithmetic takes longest; the head sees one row.

        Attention's own products, which grow with the context, are left out.
        """
        flops = self.dense_bytes_per_layer  # two for each weight of two bytes
        return [flops / (profile.cost_figures["gpu_gflops"] * 1e3)] * num_layers + [0.0]


def _shapes(
    *rows: tuple[str, int, int, float, tuple[int, int, int], int, tuple[int, int, int]],
) -> Iterator[ModelShape]:
    """Rows of (name, hidden, intermediate, bits, (heads, KV heads, head size), vocabulary, routing).

    Dense weights (q, k, v, o and the head) are BF16.
    """
    for name, hidden, intermediate, bits, (heads, kv_heads, head_dim), vocab, routing in rows:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads) * 2.0
        yield ModelShape(name, hidden, intermediate, bits, attention, hidden * vocab * 2.0, routing)


# From the models' config.json files; MXFP4 is 4.25 bits with its scales, Q4 (group 32) 4.5.
# fmt: off
SHAPES: Final[Mapping[str, ModelShape]] = {shape.name: shape for shape in _shapes(
    ("gpt-oss-20b",       2880,  2880, 4.25, (64, 8, 64),  201_088, (24, 32, 4)),
    ("gpt-oss-120b",      2880,  2880, 4.25, (64, 8, 64),  201_088, (36, 128, 4)),
    ("qwen3-30b-a3b",     2048,   768, 16,   (32, 4, 128), 151_936, (48, 128, 8)),
    ("qwen3-30b-a3b-q4",  2048,   768, 4.5,  (32, 4, 128), 151_936, (48, 128, 8)),
    ("mixtral-8x7b",      4096, 14_336, 16,  (32, 8, 128),  32_000, (32, 8, 2)),
    ("mixtral-8x7b-q4",   4096, 14_336, 4.5, (32, 8, 128),  32_000, (32, 8, 2)),
)}
# fmt: on


def find_shape(name: str | None, trace: Trace) -> ModelShape:
    """The shape by name, or by the trace's name where that names a model.

    Raises:
        ConfigError: no such model, or the trace is of another: both shapes are named.
    """
    wanted = name or trace.name
    shape = SHAPES.get(wanted.lower())
    if shape is None:
        origin = "" if name else " (the trace's name)"
        raise ConfigError(
            f"model {wanted!r}{origin} has no known sizes; give --model one of {', '.join(SHAPES)}"
        )
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    if found != shape.routing:
        raise ConfigError(
            f"trace {trace.name} has {_routing_text(found)}, {shape.name} {_routing_text(shape.routing)}; give --model "
            "what was recorded (or --num-experts, if the trace does not say and never used the last ones)"
        )
    return shape


def _routing_text(routing: tuple[int, int, int]) -> str:
    return "{} MoE layers of {} experts, top {}".format(*routing)
