"""Expert deferral: against its definition in transformers and numpy, and what it may not depend on.

What is deferred: docs/explanation/deferral.md. Without an accelerator all experts are the CPU's, so rows alone decide.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.output_changes import AUTO, effective_plan, fewest_saturating
from twofold.experts.profiles import load_profile
from twofold.experts.slot_plan import DenseCost, SlotPlan
from twofold.step.expert_loading import slot_plan

from tests.engine.model_runs import Runner, load, random_prompt
from tests.models.transformers_runs import one_torch_thread, reference, reference_logits
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

__all__ = ["one_torch_thread"]

TOP_K, PROMPT, LENGTH = 5, 7, 19
DENSE_BETWEEN = TinyModel(num_layers=5, top_k=TOP_K, mlp_only_layers=(2,))
SHARED = tiny("glm4_moe", num_layers=4, top_k=TOP_K, num_experts=8)


def deferring(model: Any, most: int) -> None:
    """Make a model of transformers defer: what a row's `most` least weighted experts say joins the next mixture."""
    mixtures = [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]
    kept: list[Any] = []
    for mixture in mixtures:

        def forward(rows: Any, ids: Any, weights: Any, *, of: Any = mixture.forward, last: bool) -> Any:
            later = torch.zeros_like(weights)
            later.scatter_(1, weights.argsort(dim=1)[:, :most], 1.0)
            later[:PROMPT] = 0
            if last:
                later[:] = 0
            total = of(rows, ids, weights * (1 - later))
            if kept:
                total = total + kept.pop()
            if not last:
                kept.append(of(rows, ids, weights * later))
            return total

        mixture.forward = lambda *args, _forward=forward, _last=mixture is mixtures[-1]: _forward(
            *args, last=_last
        )


def decoded(runner: Runner, ids: list[int]) -> np.ndarray:
    """Logits of all positions: a prompt at once, the rest token by token."""
    sequence, hidden = runner.prefill(ids[:PROMPT])
    rows = [hidden, *(runner.step((sequence, ids[at : at + 1]))[0] for at in range(PROMPT, len(ids)))]
    return runner.logits(np.concatenate(rows))


@pytest.mark.parametrize(("model", "most"), [(DENSE_BETWEEN, 1), (DENSE_BETWEEN, 3), (SHARED, 2)])
def test_equals_its_definition_in_transformers(tmp_path: Path, model: TinyModel, most: int) -> None:
    write_tiny_model(tmp_path, model)
    ids = random_prompt(LENGTH)
    theirs = reference(tmp_path)
    plain = reference_logits(theirs, ids)
    deferring(theirs, most)
    expected = reference_logits(theirs, ids)
    assert np.abs(expected - plain)[PROMPT:].max() > 1e-2, "nothing was deferred"
    ours = decoded(load(tmp_path, num_deferred=most), ids)
    assert np.abs(ours - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


def test_neither_batch_nor_chunks_change_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, replace(DENSE_BETWEEN, dtype="bfloat16"))
    prompts = [random_prompt(LENGTH, seed) for seed in range(8)]
    alone = [decoded(load(tmp_path, num_deferred=3), ids) for ids in prompts]
    runner = load(tmp_path, num_sequences=8, num_deferred=3)
    # Chunks of one token too: the last one of a prompt looks like a decode step and is none.
    sequences = [runner.prefill(ids[:PROMPT], chunks=(3, 1, 2, 1))[0] for ids in prompts]
    for at in range(PROMPT, LENGTH):
        together = runner.step(*((s, ids[at : at + 1]) for s, ids in zip(sequences, prompts, strict=True)))
        for own, hidden in zip(alone, together, strict=True):
            assert np.array_equal(runner.logits(hidden)[0], own[at])


# ---- beside slots ---------------------------------------------------------------------------------------------------

LAYERS, EXPERTS, HIDDEN, INNER = 4, 10, 16, 32


class Executor:
    """Random experts on an emulated machine, or on the CPU alone."""

    def __init__(self, num_slots: int | None, most: int) -> None:
        random = np.random.default_rng(3)
        self.pool = ops.ThreadPool(1)
        self.matrices = random.normal(0, 0.3, (LAYERS, EXPERTS, 3, INNER, HIDDEN)).astype(np.float32)
        self.store = _core.ExpertStore(EXPERTS, HIDDEN, INNER, [("f32",) * 3] * LAYERS)
        for layer, experts in enumerate(self.matrices):
            sources = [(m[0], m[1], np.ascontiguousarray(m[2].T)) for m in experts]
            self.store.put(self.pool, layer, 0, [tuple(map(weight_matrix, m)) for m in sources])
        if num_slots is None:
            self.native = _core.MoeExecutor(self.pool, self.store, num_deferred=most)
            return
        figures = load_profile("rtx4090-pcie4").cost_figures | {
            "cpu_bandwidth_gbps": 0.1,
            "link_bandwidth_gbps": 0.02,
        }
        cost = _core.CostModel(
            _core.MachineProfile.from_fields("slow", figures),
            self.store.expert_bytes,
            self.store.flops_per_token,
        )
        config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots, "payback", num_deferred=most)
        flat = [0.0] * (LAYERS + 1)
        self.native = _core.MoeExecutor.emulated(
            self.pool,
            self.store,
            cost=cost,
            config=config,
            dense=_core.DenseCost(bytes=flat, flops_per_token=flat),
            preload=False,
        )

    def play(self, steps: int, generated: list[bool] | None) -> list[tuple[Any, ...]]:
        """Per step and layer: (layer, normed, ids, weights, before, after, [rows, top_k] on the CPU)."""
        random = np.random.default_rng(5)
        rows, seen = 3, []
        self.native.events_enabled = True
        for step in range(steps):
            if generated is None:
                self.native.begin_step(step, [0, 1, 2], [9, 9, 9])
            else:
                self.native.begin_step(step, [0, 1, 2], [9, 9, 9], generated)
            hidden = random.normal(size=(rows, HIDDEN)).astype(np.float32)
            for layer in range(LAYERS):
                normed = random.normal(size=(rows, HIDDEN)).astype(np.float32)
                ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
                weights = random.dirichlet(np.ones(TOP_K), rows).astype(np.float32)
                before = hidden.copy()
                self.native.forward(layer, normed, ids, weights, hidden)
                seen.append((layer, normed, ids, weights, before, hidden.copy()))
            self.native.end_step()
        events = self.native.drain_events()["token_layer"]
        where = {(e["step"], e["layer"], e["request"]): e["placement"][:TOP_K].copy() for e in events}
        on_cpu = int(_core.Placement.CPU)
        return [
            (*layer, np.stack([where[at // LAYERS, at % LAYERS, row] == on_cpu for row in range(rows)]))
            for at, layer in enumerate(seen)
        ]

    def printed(self, layer: int, expert: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = self.matrices[layer, expert].astype(np.float64)
        g = gate @ x
        return down.T @ (g / (1 + np.exp(-g)) * (up @ x))


def weight_matrix(values: np.ndarray) -> Any:
    from tests.tiny_models.writing import weight_matrix as make

    return make(np.ascontiguousarray(values))


@pytest.mark.parametrize("num_slots", [None, 12, 30])
def test_beside_slots_those_of_the_least_weighted_that_are_on_the_cpu_are_deferred(
    num_slots: int | None,
) -> None:
    executor, most, generated = Executor(num_slots, 2), 2, [True, False, True]
    kept = np.zeros((3, HIDDEN))
    counts = []
    for layer, normed, ids, weights, before, after, on_cpu in executor.play(12, generated):
        expected, kept = before + kept, np.zeros((3, HIDDEN))
        for row in range(3):
            lightest = [k for k in np.argsort(weights[row])[:most] if on_cpu[row, k]]
            later = lightest if generated[row] and layer < LAYERS - 1 else []
            counts.append(len(later))
            for k in range(TOP_K):
                into = kept if k in later else expected
                into[row] += weights[row, k] * executor.printed(layer, ids[row, k], normed[row])
        assert np.abs(after - expected).max() < 1e-5
    assert set(counts) == ({0, 2} if num_slots is None else {0, 1, 2})
    assert executor.native.counts()["deferred"] == sum(counts)


@pytest.mark.parametrize("num_slots", [None, 12])
def test_zero_deferred_experts_are_bit_identical_to_no_deferral(num_slots: int | None) -> None:
    zero, off = (Executor(num_slots, 0).play(6, rows) for rows in ([True] * 3, None))
    assert all(np.array_equal(a[5], b[5]) for a, b in zip(zero, off, strict=True))


# ---- settings -------------------------------------------------------------------------------------------------------


def test_what_the_settings_come_to() -> None:
    figures = load_profile("rtx4090-pcie4").cost_figures
    cost = _core.CostModel(_core.MachineProfile.from_fields("m", figures), 10e6, 1e6)
    expert_us = cost.cpu_us([1]) - figures["handshake_us"]
    waits = figures["handshake_us"] + figures["join_us"]
    for share, expected in ((0.5, 1), (1.5, 2), (2.5, 3), (40, 6)):
        dense = [0.0, share * expert_us - waits, share * expert_us - waits, 0.0]
        assert fewest_saturating(cost, figures, dense, 6)[0] == expected, share
    config = EngineConfig(num_deferred_experts="auto", cache_prior=0.2)
    files: Any = SimpleNamespace(
        config=SimpleNamespace(
            moe_layers=(0, 1), num_target_moe_layers=2, routed=SimpleNamespace(num_experts=8)
        )
    )
    plan = slot_plan(config, files, 8)
    assert (plan.num_deferred, plan.cache_prior) == (AUTO, 0.2)
    flat = DenseCost([0.0] * 3, [0.0] * 3)

    def settled(plan: SlotPlan, kind: Any, top_k: int) -> tuple[SlotPlan, tuple[str, ...]]:
        return effective_plan(plan, top_k, AcceleratorChoice(kind, "asked for"), cost, figures, flat)

    none, printed = settled(plan, "none", 8)
    assert (none.num_deferred, none.cache_prior) == (0, 0.0)
    assert [text.split(":")[0] for text in printed] == [
        "expert deferral is off",
        "cache-aware routing is off",
    ]
    emulated, printed = settled(plan, "emulated", 8)
    assert (emulated.num_deferred >= 1, emulated.cache_prior, len(printed)) == (True, 0.2, 2)
    assert settled(plan, "emulated", 2)[0].num_deferred == 0
    with pytest.raises(ConfigError, match="expected 0 to 6"):
        settled(replace(plan, num_deferred=7), "emulated", 8)
    assert settled(SlotPlan(8, "lru"), "emulated", 8)[1] == ()
    for bad in ({"num_deferred_experts": "-1"}, {"num_deferred_experts": "some"}, {"cache_prior": 0.95}):
        with pytest.raises(ConfigError):
            EngineConfig(**bad)  # type: ignore[arg-type]
