"""Sizes of the models whose routing is replayed, to turn a profile into prices and times.

Only what the cost model needs: bytes and flops of an expert, bytes read for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.profiles import MachineProfile
from twofold.models.model_files import open_model_files
from twofold.models.sizing import trace_sizes
from twofold.tools.lab.trace import Trace
from twofold.weights.gguf_file import model_name


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; hidden and intermediate are one expert's (gate, up, down); bytes are as stored."""

    name: str
    hidden: float
    intermediate: float
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
        return _core.CostModel(profile.native(), self.expert_bytes, self.flops_per_token)

    def dense_us(self, profile: MachineProfile, num_layers: int) -> list[float]:
        """Time of the dense parts of one decode step: before each MoE layer, and after the last."""
        figures = profile.cost_figures
        launch, rate = figures["gpu_launch_us"], figures["vram_bandwidth_gbps"] * 1e3
        layer = launch + self.dense_bytes_per_layer / rate
        return [layer] * num_layers + [launch + self.head_bytes / rate]

    def dense_token_us(self, profile: MachineProfile, num_layers: int) -> list[float]:
        """Compute-bound time per prompt token of the same dense parts; the head processes one row.

        Leaves out attention's own products, which grow with the context.
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


MODEL_HELP: Final = (
    "model whose sizes bytes and times come from: a model directory, a GGUF file, or one of "
    f"{', '.join(SHAPES)} (default: the sizes that the trace holds, else the model that it is named after)"
)


def find_shape(model: str | None, trace: Trace) -> ModelShape:
    """The shape of `model` (a name of SHAPES or a path), else the trace's shape, else the shape that its name matches.

    Raises:
        ConfigError: no such model, or the trace is of another model; both shapes are named.
        ModelLoadError: the files at the path are not a model.
    """
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    wanted = model or trace.name
    if model is None and trace.sizes is not None:
        return ModelShape(trace.name, *trace.sizes, routing=found)
    shape = SHAPES.get(wanted.lower())
    if shape is None and model is not None and Path(model).exists():
        files = open_model_files(model)
        config = files.config
        routing = (len(config.moe_layers), config.routed.num_experts, config.routed.top_k)
        shape = ModelShape(model_name(model), *trace_sizes(files), routing=routing)
    if shape is None:
        origin = "" if model else " (the trace's name)"
        raise ConfigError(
            f"the sizes of model {wanted!r}{origin} are not known; give --model a model directory, a GGUF file, or one "
            f"of {', '.join(SHAPES)}"
        )
    if found != shape.routing:
        raise ConfigError(
            f"trace {trace.name} has {_routing_text(found)}, {shape.name} {_routing_text(shape.routing)}; give --model "
            "what was recorded (or --num-experts, if the trace does not say and never used the last ones)"
        )
    return shape


def _routing_text(routing: tuple[int, int, int]) -> str:
    return "{} MoE layers of {} experts, top {}".format(*routing)
