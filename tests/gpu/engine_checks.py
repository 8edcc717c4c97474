"""The engine on a device: logits for every placement, frozen placement, a lost step, every event told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from twofold.blocks import ops
from twofold.device.checks.self_check import check_device
from twofold.step.model import LoadedModel as CpuModel
from twofold.step.runner import ModelRunner

from benchmarks.gpu.machine import Machine, expect
from benchmarks.gpu.models import QWEN, Shape
from benchmarks.gpu.runs import (
    ALL_CPU,
    F32,
    FROZEN,
    LRU,
    PAGE_SIZE,
    TWOFOLD,
    Conversation,
    LoadedModel,
    Mode,
    check_mode,
    loaded,
    make_runner,
)
from tests.engine.scripted_sampler import ScriptedSampler

SHARES = (0.0, 0.25, 1.0)
FURTHER_SHARES = (0.1, 0.5, 0.75)
LIMIT = 2e-2
"""Largest ‖ours − reference‖ / ‖reference‖: sums in another order make roundings to bf16 fall otherwise."""
NATURAL_LIMIT = 1e-1
"""Median limit for a whole forward pass with its own routing: bf16 dense layers, and routing ties that they flip."""


def error_of(ours: F32, reference: F32) -> float:
    """Relative, over all logits."""
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))


def scripted_logits(
    machine: Machine, model: LoadedModel, runner: Any, batch: int, forced: bool = True
) -> F32:
    """Logits [batch * tokens, vocabulary] of a fixed conversation, whatever the runner would have picked."""
    count = machine.sizes.logit_tokens
    random = np.random.default_rng(6)
    vocab = model.files.config.vocab_size
    samplers = [ScriptedSampler(random.integers(0, vocab, count).tolist()) for _ in range(batch)]
    model.routing.on = forced
    try:
        Conversation(machine, model, runner, batch, samplers, forced).steps(count)
    finally:
        model.routing.on = True
    return np.stack([row for sampler in samplers for row in sampler.seen])


def reference_logits(machine: Machine, model: LoadedModel, batch: int) -> F32:
    """All experts on the CPU, every step placed by the host."""

    def compute() -> F32:
        return scripted_logits(machine, model, make_runner(machine, model, ALL_CPU, 0.0, "placed"), batch)

    return machine.keep(("reference", model.shape, batch), compute)  # type: ignore[no-any-return]


def logits_for_every_placement(
    machine: Machine, shape: Shape, batch: int, shares: Sequence[float] = SHARES
) -> dict[str, Any]:
    """Slots from none to all, steps of all three kinds, against the CPU's experts under the same routing."""
    model = loaded(machine, shape)
    reference = reference_logits(machine, model, batch)
    errors: dict[str, float] = {}
    modes: tuple[Mode, ...] = ("graph", "eager", "placed")
    for share in shares:
        for mode in modes:
            runner = make_runner(machine, model, TWOFOLD, share, mode)
            errors[f"{mode}, {share:.0%}"] = error_of(
                scripted_logits(machine, model, runner, batch), reference
            )
            check_mode(runner, mode)
    worst = max(errors.values())
    return expect(
        {"relative_error": worst, "of": errors}, worst <= LIMIT, f"relative error of at most {LIMIT}"
    )


def logits_against_the_cpu_engine(machine: Machine) -> dict[str, Any]:
    """Dense layers and routing too, against the engine without a GPU."""
    model = loaded(machine, QWEN)
    cache = ops.StateCache(model.files.config.cache_planes("float32"), 512, PAGE_SIZE)
    alone = make_runner(machine, model, ALL_CPU, 0.0, "placed").moe
    cpu = ModelRunner(CpuModel(model.files, model.pool), alone, cache)
    reference = scripted_logits(machine, model, cpu, 1, forced=False)
    ours = scripted_logits(
        machine, model, make_runner(machine, model, TWOFOLD, 0.25, "graph"), 1, forced=False
    )
    each = [error_of(a, b) for a, b in zip(ours, reference, strict=True)]
    same = float(np.mean(ours.argmax(1) == reference.argmax(1)))
    figures = {"median_relative_error": float(np.median(each)), "worst": max(each), "same_first_choice": same}
    return expect(
        figures, figures["median_relative_error"] <= NATURAL_LIMIT, f"median error of at most {NATURAL_LIMIT}"
    )


def self_check(machine: Machine, shape: Shape) -> dict[str, Any]:
    """The long form of the engine's own check, on the model's weights."""
    model = loaded(machine, shape)
    found = check_device(machine.hardware, model.files, model.pool, name=str(machine.device), long=True)
    figures = {result.name: dict(result.figures) or result.problem for result in found.results}
    return expect(figures, found.failed is None, "no check fails")


def frozen_placement(machine: Machine, mode: Mode) -> dict[str, Any]:
    """Nothing is uploaded: two runs agree bit for bit."""
    model = loaded(machine, QWEN)
    learned = machine.folder / "learned"
    warm = make_runner(machine, model, TWOFOLD, 0.5, mode)
    Conversation(machine, model, warm).steps(machine.sizes.warm_steps)
    warm.moe.executor.idle()
    warm.moe.save_cache(learned)
    runs = []
    for _ in range(2):
        runner = make_runner(machine, model, FROZEN, 0.5, mode)
        resident = runner.moe.restore_cache(learned)
        runs.append(scripted_logits(machine, model, runner, 2))
        check_mode(runner, mode)
    differing = int((runs[0] != runs[1]).sum())
    counts = runner.moe.counts()
    figures = {"differing_logits": differing, "resident": resident, "counts": vars(counts)}
    moved = counts.fetched + counts.evictions
    return expect(
        figures, differing == 0 and moved == 0 and counts.hits > 0, "no logit differs, nothing moved"
    )


class _Late:
    """A step's host side that serves once after the device has timed out."""

    def __init__(self, beneath: Any, delay_s: float) -> None:
        self._beneath, self._delay_s = beneath, delay_s

    def serve(self, number: int, limit_s: float) -> Any:
        delay_s, self._delay_s = self._delay_s, 0.0
        time.sleep(delay_s)
        return self._beneath.serve(number, limit_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)


def lost_step(machine: Machine) -> dict[str, Any]:
    """A table step that is served too late: its tokens come all the same, placed by the host."""
    model = loaded(machine, QWEN)
    reference = reference_logits(machine, model, 1)
    runner = make_runner(machine, model, TWOFOLD, 0.25, "graph", watchdog_s=0.3)
    late_s = machine.sizes.late_s
    runner._table = _Late(runner._table, late_s)
    error = error_of(scripted_logits(machine, model, runner, 1), reference)
    fell_back = runner.why_placed is not None
    figures = {"relative_error": error, "fell_back_because": runner.why_placed}
    return expect(
        figures, error <= LIMIT and (fell_back or late_s == 0.0), "the step is lost and its answer is not"
    )


def every_event_is_reported(machine: Machine, mode: Mode) -> dict[str, Any]:
    """Placement of every token in every layer, every upload with begin, end and lane, every eviction."""
    model = loaded(machine, QWEN)
    runner = make_runner(machine, model, LRU, 0.25, mode)
    runner.moe.executor.events_enabled = True
    conversation = Conversation(machine, model, runner, batch=2)
    conversation.steps(machine.sizes.warm_steps)
    runner.moe.executor.idle()
    events, counts = runner.moe.drain_events(), runner.moe.counts()
    tokens, uploads = events["token_layer"], events["upload"]
    expected_rows = (2 * (conversation.step - 1) + 2 * 4) * model.moe_shape.num_layers
    placed = tuple(int(tokens[name].sum()) for name in ("num_hits", "num_cpu", "num_fetched"))
    evictions = int((events["cache_event"]["kind"] == 1).sum())
    dropped = sum(runner.moe.executor.take_dropped().values())
    figures = {
        "token_layers": len(tokens), "expected_token_layers": expected_rows, "placed": placed,
        "uploads": len(uploads), "upload_bytes": int(uploads["size_bytes"].sum()), "evictions": evictions,
        "dropped": dropped, "counts": vars(counts),
    }  # fmt: skip
    holds = (
        len(tokens) == expected_rows
        and placed == (counts.hits, counts.cpu_misses, counts.fetched)
        and len(uploads) == counts.uploads
        and int(uploads["size_bytes"].sum()) == counts.h2d_bytes
        and bool((uploads["begin_us"] < uploads["end_us"]).all())
        and evictions == counts.evictions
        and dropped == 0
    )
    return expect(figures, holds, "as many rows as there were placements, uploads and evictions")


def logits_for_further_placements(machine: Machine, shape: Shape) -> dict[str, Any]:
    """`logits_for_every_placement` at the shares between."""
    return logits_for_every_placement(machine, shape, 1, FURTHER_SHARES)
