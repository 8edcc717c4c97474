"""A model at full depth, as a user runs it: decode and prefill beside the engine without a GPU, and `fit`'s prediction.

Contenders that fit beside one another decode in turn on the same routing. All experts in slots come after them, alone,
because they fill the card's memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Final

from twofold.blocks import ops
from twofold.fit.speed import device_speed
from twofold.step.model import LoadedModel as CpuModel
from twofold.step.runner import ModelRunner, Runner
from twofold.weights.host_memory import available_memory_bytes

from benchmarks.gpu.engine_speed import Contender, compare, measured_profile, ratio
from benchmarks.gpu.machine import Machine, expect
from benchmarks.gpu.models import QWEN, Shape, model_files, shrunk
from benchmarks.gpu.runs import (
    ALL_CPU,
    LRU,
    MAX_CONTEXT,
    MOST_BATCH,
    PAGE_SIZE,
    TWOFOLD,
    Conversation,
    LoadedModel,
    experts_on_cpu,
    loaded,
    make_runner,
)

LAYERS: Final = 48
"""Layers of Qwen3-30B-A3B."""
_KEPT_FREE: Final = 20 << 30
"""Host memory left for the rest of the process and the page cache."""
_WARM_STEPS: Final = 48
_STEPS: Final = 32
"""Steps per round; without a GPU one takes about 50 ms at this depth."""
_NONE, _NO_SLOTS, _QUARTER, _LRU, _ALL = "none", "0 % slots", "25 % slots", "25 % slots, LRU", "100 % slots"


def whole_shape(machine: Machine) -> Shape:
    """Qwen3-30B-A3B with as many of its layers as the host's memory holds."""
    layer_bytes = 2 * 3 * QWEN.num_experts * QWEN.hidden * QWEN.intermediate
    room = int(max(0, 0.8 * available_memory_bytes() - _KEPT_FREE)) // layer_bytes
    fitting = LAYERS if machine.sizes.shrink > 1 else min(LAYERS, max(machine.sizes.model_layers, room))
    layers = machine.keep("whole layers", lambda: fitting)
    return dataclasses.replace(QWEN, layers=layers)


def cpu_runner(model: LoadedModel) -> Runner:
    """The engine without a GPU."""
    planes = model.files.config.cache_planes("bfloat16")
    cache = ops.StateCache(planes, MOST_BATCH * MAX_CONTEXT // PAGE_SIZE, PAGE_SIZE)
    return ModelRunner(CpuModel(model.files, model.pool), experts_on_cpu(model, model.store), cache)


def _prefill_tokens_per_s(machine: Machine, model: LoadedModel, runner: Any) -> float:
    """The faster of two prompts: the first one also warms up."""
    count = machine.sizes.prompt_tokens
    seconds = [
        Conversation(machine, model, runner, prompt_tokens=count, forced=False).steps(1)[0] for _ in range(2)
    ]
    return count / min(seconds)


def _figures(machine: Machine, model: LoadedModel, contender: Contender) -> dict[str, float]:
    counts = contender.runner.moe.counts()
    routed = counts.hits + counts.cpu_misses + counts.fetched
    return {
        "decode_tokens_per_s": statistics.median(contender.tokens_per_s),
        "prefill_tokens_per_s": _prefill_tokens_per_s(machine, model, contender.runner),
        "hit_rate": counts.hits / max(1, routed),
    }


def decode_and_prefill(machine: Machine) -> dict[str, Any]:
    """Tokens per second of one sequence, by share of the experts in slots, beside `--accelerator none`."""
    sizes = machine.sizes
    machine = dataclasses.replace(
        machine,
        sizes=dataclasses.replace(
            sizes, warm_steps=min(_WARM_STEPS, sizes.warm_steps), steps=min(_STEPS, sizes.steps)
        ),
    )
    model = loaded(machine, whole_shape(machine))
    made = compare(
        machine,
        model,
        [
            (_NONE, lambda: cpu_runner(model)),
            (_NO_SLOTS, lambda: make_runner(machine, model, ALL_CPU, 0.0, "graph")),
            (_QUARTER, lambda: make_runner(machine, model, TWOFOLD, 0.25, "graph")),
            (_LRU, lambda: make_runner(machine, model, LRU, 0.25, "graph")),
        ],
    )
    none, _, quarter, lru = made
    figures: dict[str, Any] = {"layers": model.moe_shape.num_layers, "routing": model.trace.source}
    figures |= {
        "quarter_over_none": ratio(quarter, none),
        "payback_over_lru": ratio(quarter, lru),
    }
    figures |= {each.name: _figures(machine, model, each) for each in made}
    machine.kept["decode at a quarter"] = figures[_QUARTER]["decode_tokens_per_s"]
    made.clear()
    del none, quarter, lru
    machine.forget()
    figures[_ALL] = _all_in_slots(machine, model)
    holds = figures["quarter_over_none"] > 1.0
    return expect(figures, holds, "25 % slots decode faster than --accelerator none")


def _all_in_slots(machine: Machine, model: LoadedModel) -> dict[str, float] | str:
    needed = model.store.expert_bytes * model.num_experts
    free = machine.hardware.native.facts()["free_bytes"]
    if needed > 0.95 * free:
        return f"does not fit: {needed / 1e9:.1f} GB of experts, {free / 1e9:.1f} GB of VRAM are free"
    alone = compare(machine, model, [(_ALL, lambda: make_runner(machine, model, TWOFOLD, 1.0, "graph"))])
    return _figures(machine, model, alone[0])


def fit_estimate(machine: Machine) -> dict[str, Any]:
    """`twofold fit`'s decode speed at 25 % slots from the calibrated profile, beside the measured one."""
    measured = machine.kept.get("decode at a quarter")
    if measured is None:
        measured = decode_and_prefill(machine)[_QUARTER]["decode_tokens_per_s"]
    profile = measured_profile(machine, QWEN)
    files = model_files(machine, shrunk(whole_shape(machine), machine.sizes.shrink))
    num_experts = len(files.config.moe_layers) * files.config.routed.num_experts
    predicted = device_speed(files, profile, [round(0.25 * num_experts)], MAX_CONTEXT // 4)
    over = predicted.decode / measured
    figures = {
        "predicted_tokens_per_s": predicted.decode, "measured_tokens_per_s": measured, "predicted_over_measured": over,
        "predicted_prefill_tokens_per_s": predicted.prefill,
    }  # fmt: skip
    return expect(
        figures, 0.7 <= over <= 1.4, "between 0.7 and 1.4 of the measured speed: routing is drawn apart"
    )
