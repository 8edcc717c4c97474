"""Predicted speed of a model: on the CPU from rates, with an accelerator from the scheduler on a virtual clock.

Rates are measured on random weights of the model's own shapes, or taken from a machine profile. Predictions leave out
HTTP and a busy machine.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.head import Embedding
from twofold.experts.calibration import LayerTimer, random_matrix
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import MoeShape
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import dense_stretches, trace_sizes
from twofold.step.expert_loading import moe_shape

CHUNK: Final = 512
"""Prompt tokens per step."""
_STORE_BYTES: Final = 256 << 20
_DENSE_BYTES: Final = 96 << 20
_SKEW: Final = 0.7
"""Exponent of the Zipf law by which drawn routing prefers experts."""
_DRAWN_TOKENS: Final = 64


@dataclass(frozen=True)
class Rates:
    """How fast a CPU runs the parts of one model."""

    decode_layer_us: float
    """Experts of one MoE layer for one token."""
    chunk_layer_us: float
    """Experts of one MoE layer for a prompt chunk."""
    dense_gbps: float
    """Weights and KV cache read by one token, outside the experts."""
    dense_gflops: float
    """Products of a prompt chunk, outside the experts."""
    source: str


@dataclass(frozen=True)
class Speed:
    """Predicted tokens per second."""

    decode: float
    prefill: float
    context: int
    """Context length of the decoded token, and the prompt's length."""
    source: str


def measure_rates(files: ModelFiles, pool: ops.ThreadPool) -> Rates:
    """Measure a layer's experts and a dense product of the model's shapes; about two seconds."""
    decode_us = chunk_us = 0.0
    shape = moe_shape(files)
    if files.config.moe_layers:
        timer = LayerTimer(_few(shape), pool)
        repeats = 5
        decode_us = timer.time((1,) * shape.top_k, repeats)
        chunk_us = timer.time(_chunk_loads(timer.shape), repeats)
        chunk_us *= _chunk_share(shape, timer.shape)
    gbps, gflops = _dense_rates(files, pool)
    return Rates(decode_us, chunk_us, gbps, gflops, f"measured on {pool.num_threads} threads")


def profile_rates(files: ModelFiles, profile: MachineProfile) -> Rates:
    """The same from a profile's figures."""
    figures, shape = profile.cost_figures, moe_shape(files)
    sizes = trace_sizes(files)
    expert_bytes = 3 * sizes.hidden * sizes.intermediate * sizes.bits_per_weight / 8
    overhead, gbps = figures["cpu_expert_overhead_us"], figures["cpu_bandwidth_gbps"]
    read_us = expert_bytes / gbps / 1e3
    per_expert = CHUNK * shape.top_k / shape.num_experts
    flops_us = 6 * sizes.hidden * sizes.intermediate * per_expert / figures["cpu_gflops"] / 1e3
    return Rates(
        shape.top_k * (overhead + read_us),
        shape.num_experts * (overhead + max(read_us, flops_us)),
        gbps,
        figures["cpu_gflops"],
        f"profile {profile.name}",
    )


def cpu_speed(files: ModelFiles, rates: Rates, context: int) -> Speed:
    """Speed with every weight on the CPU."""
    layers = len(files.config.moe_layers)
    num_bytes = sum(_costs(files, 1, context, "num_bytes"))
    token_us = num_bytes / rates.dense_gbps / 1e3 + layers * rates.decode_layer_us
    chunk = min(CHUNK, max(1, context))
    flops = sum(_costs(files, chunk, context // 2, "flops"))
    chunk_us = flops / rates.dense_gflops / 1e3 + layers * rates.chunk_layer_us * chunk / CHUNK
    return Speed(1e6 / token_us, chunk * 1e6 / chunk_us, context, rates.source)


def device_speed(files: ModelFiles, profile: MachineProfile, num_slots: int, context: int) -> Speed:
    """Speed with dense weights on the accelerator and `num_slots` expert slots, for routing drawn by a Zipf law."""
    figures, shape, sizes = profile.cost_figures, moe_shape(files), trace_sizes(files)
    machine = _core.MachineProfile.from_fields(profile.name, figures)
    expert_bytes = 3 * sizes.hidden * sizes.intermediate * sizes.bits_per_weight / 8
    cost = _core.CostModel(machine, expert_bytes, 6.0 * sizes.hidden * sizes.intermediate, ())
    stretch_bytes, stretch_flops, _ = dense_stretches(files)
    cache = files.config.cache_bytes_per_token(files.config.cache_dtype("bfloat16")) * context
    vram = figures["vram_bandwidth_gbps"] * 1e3
    dense_us = [
        figures["gpu_launch_us"] + (each + cache / len(stretch_bytes)) / vram for each in stretch_bytes
    ]
    token_us = [each / figures["gpu_gflops"] / 1e3 for each in stretch_flops]
    speeds = []
    for tokens, prompt_chunk in ((_DRAWN_TOKENS, 0), (CHUNK, CHUNK)):
        ids = draw_routing(shape, tokens)
        trace = _core.RoutingTrace(ids, None, np.array([0, tokens], np.int64), shape.num_experts)
        counts = [
            np.bincount(ids[:, layer].ravel(), minlength=shape.num_experts)
            for layer in range(shape.num_layers)
        ]
        config = _core.SchedulerConfig(
            shape.num_layers,
            shape.num_experts,
            shape.top_k,
            num_slots,
            prior_usage=[float(n) for n in np.concatenate(counts)],
        )
        played = _core.simulate(
            trace, 1, cost, config, dense_us=dense_us, prompt_chunk=prompt_chunk, token_us=token_us
        )
        speeds.append(played.num_tokens / played.total_us * 1e6)
    return Speed(speeds[0], speeds[1], context, f"profile {profile.name}, routing drawn by a Zipf law")


@functools.lru_cache(maxsize=4)
def draw_routing(shape: MoeShape, tokens: int) -> npt.NDArray[np.uint16]:
    """Ids [tokens, layers, top-k]: each layer prefers its own experts, draws are independent."""
    random = np.random.default_rng(0)
    popularity = -_SKEW * np.log(1 + np.arange(shape.num_experts))
    ids = np.empty((tokens, shape.num_layers, shape.top_k), np.uint16)
    for layer in range(shape.num_layers):
        # The largest of Gumbel noise plus log-probability are a draw without replacement.
        noise = random.gumbel(size=(tokens, shape.num_experts)) + random.permutation(popularity)
        ids[:, layer] = np.argpartition(-noise, shape.top_k - 1, axis=1)[:, : shape.top_k]
    return ids


def _few(shape: MoeShape) -> MoeShape:
    """One layer of the shape, with fewer experts if they are large."""
    one = 3 * shape.hidden * shape.intermediate
    count = min(shape.num_experts, max(2 * shape.top_k, _STORE_BYTES // one))
    return replace(shape, num_layers=1, num_experts=count, formats=shape.formats[:1])


def _chunk_loads(shape: MoeShape) -> tuple[int, ...]:
    return (max(1, CHUNK * shape.top_k // shape.num_experts),) * shape.num_experts


def _chunk_share(shape: MoeShape, timed: MoeShape) -> float:
    """Products of a chunk in the model's layer over those in the timed one."""
    return CHUNK * shape.top_k / sum(_chunk_loads(timed))


def _costs(files: ModelFiles, tokens: int, context: int, field: str) -> list[float]:
    """Costs of a step's parts outside the experts; the head runs for one token."""
    parts = [
        (part, weights) for part, weights in files.parts() if not isinstance(part, ExpertBlock | Embedding)
    ]
    head = files.config.head
    return [
        getattr(part.cost(weights, 1 if part is head else tokens, context), field) for part, weights in parts
    ]


def _dense_rates(files: ModelFiles, pool: ops.ThreadPool) -> tuple[float, float]:
    """(GB/s of one row, GFLOP/s of a chunk) of products with matrices of the model's width and usual dense format."""
    hidden = files.config.routed.hidden_size
    format_name = _usual_dense_format(files)
    matrix = random_matrix(np.random.default_rng(0), format_name, 2 * hidden, hidden)
    packed = ops.PackedMatrix(pool, [matrix])
    count = max(1, min(24, _DENSE_BYTES // packed.bytes))
    heads = [
        ops.LmHead(
            pool, np.ones(hidden, np.float32), packed if i == 0 else ops.PackedMatrix(pool, [matrix]), 1e-6
        )
        for i in range(count)
    ]
    read_s = _fastest(heads, 1, hidden, packed.rows) / count
    chunk_s = _fastest(heads[:2], CHUNK, hidden, packed.rows) / len(heads[:2])
    flops = 2.0 * packed.rows * hidden * CHUNK
    return packed.bytes / read_s / 1e9, flops / chunk_s / 1e9


def _fastest(heads: list[ops.LmHead], rows: int, hidden: int, columns: int) -> float:
    """Median seconds of one pass over `heads`."""
    given, out = np.ones((rows, hidden), np.float32), np.empty((rows, columns), np.float32)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for head in heads:
            head.forward(given, out)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _usual_dense_format(files: ModelFiles) -> str:
    """Format of most dense weights by elements."""
    elements: dict[str, float] = {}
    for part, weights in files.parts():
        if not isinstance(part, ExpertBlock | Embedding):
            for name, spec in weights.specs.items():
                if len(spec.shape) > 1:
                    found = weights.format(name)
                    elements[found] = elements.get(found, 0.0) + math.prod(spec.shape)
    return max(elements, key=lambda name: elements[name], default="f32")
