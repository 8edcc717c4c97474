"""Depths by price: the choice against brute force, the estimates against examples by hand, both on a virtual clock."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.step import draft_price
from twofold.step.draft_price import Acceptance, Cells, Probes, StepTimes, choose_depths

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import NGRAM, Asked, ScriptedDrafter, answers, use_drafter
from tests.tiny_models.writing import TinyModel, write_tiny_model


@given(st.data())
def test_the_depths_are_the_best_ones(data: st.DataObject) -> None:
    chance = st.floats(0.0, 1.0)
    chances = data.draw(st.lists(st.lists(chance, min_size=1, max_size=4), min_size=1, max_size=3))
    num_sequences = data.draw(st.integers(len(chances), 5))
    most = sum(map(len, chances))
    increments = data.draw(st.lists(st.floats(0.0, 1.0), min_size=most, max_size=most))
    times = [1.0 + sum(increments[:count]) for count in range(most + 1)]

    def rate(depths: tuple[int, ...]) -> float:
        accepted = sum(
            prod(own[:at]) for own, depth in zip(chances, depths, strict=True) for at in range(1, depth + 1)
        )
        return (num_sequences + accepted) / times[sum(depths)]

    best = max(map(rate, itertools.product(*(range(len(own) + 1) for own in chances))))
    chosen = choose_depths(chances, times, num_sequences)
    threshold = draft_price.LEAST_GAIN * rate((0,) * len(chances))
    if best > threshold:
        assert rate(tuple(chosen)) == pytest.approx(best)
    else:
        assert not any(chosen)


def test_no_more_is_drafted_than_has_a_price() -> None:
    assert choose_depths([[1.0] * 8, [1.0] * 8], [1.0, 1.1, 1.2], 2) == [1, 1]


def test_acceptance_is_learned_by_request_and_of_all() -> None:
    acceptance = Acceptance()
    accepted_cells: Cells = {}
    rejected_cells: Cells = {}
    assert acceptance.chances("a", accepted_cells, (0.9, 0.5)) == pytest.approx([0.9, 0.5])
    # By hand: one rejection. All: (0 + 2 * 0.9) / 3 = 0.6. One trial of the request itself is chance.
    acceptance.observe("a", rejected_cells, (0.9,), 0)
    assert acceptance.chances("a", accepted_cells, (0.9,)) == pytest.approx([0.6])
    assert acceptance.chances("a", rejected_cells, (0.9,)) == pytest.approx([0.6])
    assert acceptance.chances("b", {}, (0.9,)) == pytest.approx([0.9])
    # The second token's statement is taken to be as far too high as the first one's.
    assert acceptance.chances("a", accepted_cells, (0.9, 0.9)) == pytest.approx([0.6, 0.6])
    for _ in range(40):
        acceptance.observe("a", rejected_cells, (0.9, 0.9), 0)
        acceptance.observe("a", accepted_cells, (0.9, 0.9), 2)
    assert acceptance.chances("a", rejected_cells, (0.9,))[0] < 0.15
    assert acceptance.chances("a", accepted_cells, (0.9,))[0] > 0.85
    # Tokens after a rejected one are no trial.
    assert (1, 4) not in rejected_cells


class LinearExperts:
    """1 ms per token."""

    token_s = 1e-3

    def refresh(self) -> None: ...
    def step_s(self, num_tokens: int) -> float:
        return self.token_s * num_tokens

    def begin(self) -> None: ...
    def observe(self, num_tokens: int) -> None: ...


def test_times_are_estimated_then_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_price, "_PLAIN_AFTER", 10_000)
    times = StepTimes(LinearExperts(), depth=4)
    assert times.table(1) is None
    for _ in range(3):
        times.observe(1, 1, 10e-3)
    # The model's 1 ms per token, and 1 % of a step.
    assert times.table(1) == pytest.approx([1.0, 1.11, 1.22, 1.33, 1.44], abs=1e-3)
    assert times.table(2) is None
    # Steps of two drafts take 8 ms more, where the model says 2: all depths become dearer.
    for _ in range(200):
        times.observe(1, 3, 18e-3)
        times.observe(1, 1, 10e-3)
    assert times.table(1) == pytest.approx([1.0, 1.4, 1.8, 2.2, 2.6], abs=0.1)
    assert times.plain_s(1) == pytest.approx(10e-3, rel=0.02)
    assert times.estimated_s(1, 2) == pytest.approx(18e-3, rel=0.02)
    # Other load: a step that takes ten times as long counts as twice the expected time.
    times.observe(1, 3, 180e-3)
    assert times.estimated_s(1, 2) < 19e-3
    # A machine that gets slower: older steps fade.
    for _ in range(600):
        times.observe(1, 3, 20e-3)
        times.observe(1, 1, 16e-3)
    assert times.table(1) == pytest.approx([1.0, 1.125, 1.25, 1.375, 1.5], abs=0.01)


def test_a_plain_time_follows_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted steps and the model's time fall together while the cache fills; so then does the time without drafts."""
    monkeypatch.setattr(draft_price, "_PLAIN_AFTER", 10_000)
    experts = LinearExperts()
    times = StepTimes(experts, depth=2)
    times.observe(1, 1, 10e-3 + 4e-3)
    for number in range(60):
        per_token_s = 4e-3 / (1 + number / 10)
        experts.token_s = per_token_s
        times.observe(1, 3, 10e-3 + 3 * per_token_s)
    assert times.plain_s(1) == pytest.approx(10e-3 + per_token_s, rel=0.08)


def test_probes_may_lose_a_share_of_the_time() -> None:
    """By hand: a draft that loses 0.3 steps is tried after 60 steps at 0.5 %, one that loses nothing after 4."""
    for times, expected in (([1.0, 1.5], 60), ([1.0, 1.1], 4)):
        probes = Probes(4)
        num_passed = 0
        while not probes.is_due([0.2], times):
            probes.passed()
            num_passed += 1
        assert num_passed == pytest.approx(expected, abs=1)
        probes.begin()
        assert not probes.is_due([0.2], times)
    probes.judge(1, 1)
    assert probes.depth == 2
    probes.judge(2, 2)
    probes.judge(4, 4)
    assert probes.depth == 4
    probes.judge(4, 3)
    assert probes.depth == 1


def test_a_step_without_drafts_is_measured_again() -> None:
    times = StepTimes(LinearExperts(), depth=4)
    times.observe(1, 1, 10e-3)
    for _ in range(draft_price._PLAIN_AFTER - 1):
        assert times.table(1) is not None
        times.observe(1, 2, 11e-3)
    assert times.table(1) is not None
    times.observe(1, 2, 11e-3)
    assert times.table(1) is None
    times.observe(1, 1, 10e-3)
    assert times.table(1) is not None


NUM_TOKENS = 400


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = TinyModel(num_layers=4, num_experts=16, top_k=2, hidden_size=64, moe_intermediate_size=64)
    return EngineConfig(
        model=str(write_tiny_model(tmp_path_factory.mktemp("model"), model)),
        accelerator="emulated:rtx4090-pcie4",
        gpu_experts_ratio=0.25,
        cpu_threads=1,
        enable_prefix_caching=False,
    )


def virtual_s(
    config: EngineConfig, wrong: float | None = None, *, adaptive: bool = True, depth: int = 8
) -> float:
    """Decode time of one answer on the virtual clock, which other load does not change. wrong: None for no drafts."""
    requested = Asked(
        tuple(random_prompt(20, 5)),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1, ignore_eos=True),
    )
    plain = Engine.load(config)
    known = {requested[:2]: answers(plain, [requested])[0].tokens}
    plain.close()
    engine = Engine.load(replace(config, speculative_config=NGRAM))
    use_drafter(
        engine,
        ScriptedDrafter(known, 0.0 if wrong is None else wrong, 0 if wrong is None else depth),
        adaptive=adaptive,
    )
    begin = engine._run_clock.read()
    assert answers(engine, [requested])[0].tokens == known[requested[:2]]
    took = engine._run_clock.read() - begin
    engine.close()
    return took


def test_a_useless_drafter_costs_three_percent_at_most(emulated: EngineConfig) -> None:
    off = virtual_s(emulated)
    assert virtual_s(emulated, 1.0, adaptive=False, depth=4) > 1.15 * off, "a fixed depth would cost more"
    assert virtual_s(emulated, 1.0) <= 1.03 * off


def test_an_oracle_gains_what_the_best_fixed_depth_does(emulated: EngineConfig) -> None:
    fixed = [virtual_s(emulated, 0.0, adaptive=False, depth=depth) for depth in (1, 3, 8)]
    assert min(fixed) < 0.7 * virtual_s(emulated)
    assert virtual_s(emulated, 0.0) <= 1.1 * min(fixed)


@pytest.mark.parametrize("wrong", [0.2, 0.5, 0.8])
def test_the_adaptive_depth_is_near_the_best_fixed_one(emulated: EngineConfig, wrong: float) -> None:
    fixed = [
        virtual_s(emulated),
        *(virtual_s(emulated, wrong, adaptive=False, depth=depth) for depth in (1, 2, 4)),
    ]
    # The answer is short, so what the price costs to learn is seen.
    assert virtual_s(emulated, wrong) <= min(1.06 * min(fixed), 1.03 * fixed[0])


def test_the_union_of_experts_is_counted(tmp_path: Path) -> None:
    model = TinyModel(num_layers=2, num_experts=8, top_k=2)
    engine = Engine.load(
        EngineConfig(model=str(write_tiny_model(tmp_path, model)), accelerator="none", cpu_threads=1)
    )
    moe = draft_price.MoeTimes(engine.runner.moe)
    engine.generate(tuple(random_prompt(9, 1)), SamplingParams(max_tokens=5, ignore_eos=True))
    runs = engine.runner.moe.num_expert_runs
    # 4 single tokens with 2 experts in 2 layers; a prompt of 9 tokens with at most 8 in each.
    assert 4 * 4 < runs <= 4 * 4 + 2 * 8
    assert moe._independent(1) == pytest.approx(2)
    assert moe._independent(2) == pytest.approx(3.5)
    assert moe.step_s(8) > moe.step_s(1) > 0
    engine.close()
