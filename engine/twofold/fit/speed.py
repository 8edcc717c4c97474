"""Predicted speed of a model.

On this CPU it comes from measured layers, on another machine's from its profile's rates, with an accelerator from the
scheduler on a virtual clock. Predictions leave out HTTP and a busy machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.head import Embedding
from twofold.experts.calibration import LayerTimer
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import MoeShape
from twofold.fit.layer_times import LayerTimes, StepPart
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import dense_stretches, trace_sizes
from twofold.step.expert_loading import moe_shape
from twofold.step.prefill_budget import PrefillBudget

CHUNK: Final = 512
"""Prompt tokens per step."""
_STORE_BYTES: Final = 256 << 20
_REPEATS: Final = 5
STEP_US: Final = 350.0
"""Scheduling, sampling and delivery of a step with one sequence."""
_SKEW: Final = 0.7
"""Exponent of the Zipf law by which drawn routing prefers experts."""
_DRAWN_TOKENS: Final = 64


@dataclass(frozen=True)
class Rates:
    """How fast a CPU runs the parts of one model, by a profile."""

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


def measured_speed(
    files: ModelFiles,
    pool: ops.ThreadPool,
    context: int,
    cache_dtype: CacheDType = "bfloat16",
    *,
    clock: Callable[[], float] | None = None,
) -> Speed:
    """Speed with every weight on this CPU, from measured layers; about three seconds.

    Routed experts are random ones of the model's shape. The rest of a layer has the model's own weights. A prompt comes
    in the chunks that the engine takes while nothing decodes. `clock` (seconds) replaces the wall clock.
    """
    times = LayerTimes(files, pool, cache_dtype, clock or time.perf_counter)
    experts = _ExpertTimes(files, pool, clock)
    head_us, chunk = times.of_head(), min(CHUNK, max(1, context))
    token_us, dense_us = times.of_steps([StepPart(1, max(0, context - 1)), _middle(chunk, context)])
    token_us += experts.token_us() + head_us + STEP_US
    steps_us = {chunk: dense_us + experts.chunk_us(chunk) + STEP_US}
    budget = PrefillBudget(CHUNK)
    budget.observe(0, 1, token_us / 1e6)
    budget.observe(chunk, 0, steps_us[chunk] / 1e6)
    chunk = min(chunk, budget.num_tokens(0))
    num_chunks, rest = divmod(context, chunk)
    if further := sorted({chunk, rest} - {0, *steps_us}):
        dense = times.of_steps([_middle(tokens, context) for tokens in further])
        for tokens, dense_us in zip(further, dense, strict=True):
            steps_us[tokens] = dense_us + experts.chunk_us(tokens) + STEP_US
    prefill_us = num_chunks * steps_us[chunk] + (steps_us[rest] if rest else 0.0) + head_us
    source = f"measured on {pool.num_threads} threads"
    return Speed(1e6 / token_us, context * 1e6 / prefill_us, context, source)


def _middle(tokens: int, context: int) -> StepPart:
    """A chunk in the middle of its prompt."""
    return StepPart(tokens, (context - tokens) // 2)


class _ExpertTimes:
    """Microseconds of a step's routed experts, all layers together; nothing for a dense model."""

    def __init__(self, files: ModelFiles, pool: ops.ThreadPool, clock: Callable[[], float] | None) -> None:
        self._shape, self._layers = moe_shape(files).of_text, len(files.config.moe_layers)
        self._timer = LayerTimer(_few(self._shape), pool, clock=clock) if self._layers else None

    def token_us(self) -> float:
        return self._layers * self._timer.time((1,) * self._shape.top_k, _REPEATS) if self._timer else 0.0

    def chunk_us(self, tokens: int) -> float:
        if self._timer is None:
            return 0.0
        loads, share = _chunk_loads(self._shape, tokens, self._timer.shape.num_experts)
        return self._layers * self._timer.time(loads, _REPEATS) * share


def profile_rates(files: ModelFiles, profile: MachineProfile) -> Rates:
    """The same from a profile's figures."""
    figures, shape = profile.cost_figures, moe_shape(files).of_text
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


def device_speed(files: ModelFiles, profile: MachineProfile, slots: Sequence[int], context: int) -> Speed:
    """Speed with dense weights on the first device and each device's expert slots, for routing drawn by a Zipf law."""
    figures, shape = profile.cost_figures, moe_shape(files).of_text
    stretch_bytes, stretch_flops, _ = dense_stretches(files)
    cache = files.config.cache_bytes_per_token(files.config.cache_dtype("bfloat16")) * context
    vram = figures["vram_bandwidth_gbps"] * 1e3
    dense_us = [
        figures["gpu_launch_us"] + (each + cache / len(stretch_bytes)) / vram for each in stretch_bytes
    ]
    token_us = [each / figures["gpu_gflops"] / 1e3 for each in stretch_flops]
    if not shape.num_layers:
        step_us = max(sum(dense_us), CHUNK * sum(token_us))
        return Speed(1e6 / sum(dense_us), CHUNK * 1e6 / step_us, context, f"profile {profile.name}")
    sizes, speeds = trace_sizes(files), []
    expert_bytes = 3 * sizes.hidden * sizes.intermediate * sizes.bits_per_weight / 8
    cost = _core.CostModel(profile.native(), expert_bytes, 6.0 * sizes.hidden * sizes.intermediate, ())
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
            list(slots),
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
    first = replace(shape, formats=shape.formats[:1])
    return replace(first, num_layers=1, num_experts=count, formats=(first.usual,))


def _chunk_loads(shape: MoeShape, tokens: int, timed: int) -> tuple[tuple[int, ...], float]:
    """(tokens of each of at most `timed` experts, how many times as much work the layer's active experts have).

    All experts' loads follow the drawn routing: some get many tokens, many get few. Each timed expert stands for a
    group of like ones and has their mean load.
    """
    ids = draw_routing(replace(shape, num_layers=1), tokens)
    loads = np.sort(np.bincount(ids.ravel(), minlength=shape.num_experts))
    groups = np.array_split(loads[loads > 0], timed)
    means = tuple(round(float(group.mean())) for group in groups if len(group))
    return means, float(loads.sum() / sum(means))


def _costs(files: ModelFiles, tokens: int, context: int, field: str) -> list[float]:
    """Costs of a step's parts outside the experts; the head runs for one token."""
    parts = [
        (part, weights) for part, weights in files.parts() if not isinstance(part, ExpertBlock | Embedding)
    ]
    head = files.config.head
    return [
        getattr(part.cost(weights, 1 if part is head else tokens, context), field) for part, weights in parts
    ]
