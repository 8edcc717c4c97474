"""Placements on an engine: what strategies put into slots stays there, long prompts move it where that was asked for,
and whatever is moved changes no token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.placement import Mask, placement_mask

from tests.tiny_models.writing import TinyModel, write_tiny_model

LAYERS, EXPERTS, SLOTS = 3, 8, 10
PROMPTS = [tuple(np.random.default_rng(n).integers(5, 300, 40 + 3 * n).tolist()) for n in range(16)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyModel(num_layers=LAYERS, num_experts=EXPERTS)
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", shape)
    counts = np.random.default_rng(5).integers(0, 9, (2, LAYERS, EXPERTS))
    write_statistics(path.parent / "counts.pt", counts)
    write_statistics(path.parent / "counts.npz", counts)
    return path


def load(model: Path, strategy: str = "uniform", **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "accelerator": "emulated:rtx4090-pcie4",
        "gpu_experts_ratio": SLOTS / LAYERS / EXPERTS,
        "cpu_threads": 1,
        "max_total_tokens": 4096,
    }
    return Engine.load(
        EngineConfig(model=str(model), expert_placement_strategy=strategy, **(defaults | settings))
    )


def answers(engine: Engine, change: Any = None) -> list[list[int]]:
    """16 streams at once, 24 tokens each; `change(step)` before each step."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    ends: list[str | None] = [None] * len(PROMPTS)

    def taking(n: int) -> Any:
        def take(chunk: Any) -> None:
            found[n].extend(chunk.token_ids)
            ends[n] = chunk.finish_reason or ends[n]

        return take

    for n, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9 * (n % 2), seed=n)
        engine.submit(GenerationRequest(prompt, sampling, taking(n), f"r{n}"))
    step = 0
    while engine.step():
        if change is not None:
            change(step)
        step += 1
    assert set(ends) == {"length"}
    return found


def resident(engine: Engine) -> Mask:
    mask = np.zeros((LAYERS, EXPERTS), np.bool_)
    for layer, experts in enumerate(engine.control.expert_placement().resident):
        mask[layer, list(experts)] = True
    return mask


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    engine = load(model, "payback", accelerator="none", gpu_experts_ratio=None)
    found = answers(engine)
    engine.close()
    return found


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    loaded = load(model)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("strategy", ["uniform", "front-loading", "random", "counts.pt", "counts.npz"])
def test_a_static_strategy_fills_the_slots_permanently(
    model: Path, expected: list[list[int]], strategy: str
) -> None:
    settings, counts = {}, None
    if strategy.startswith("counts"):
        settings["init_expert_location"] = str(model.parent / strategy)
        counts = np.random.default_rng(5).integers(0, 9, (2, LAYERS, EXPERTS)).sum(axis=0)
        strategy = "frequency"
    engine = load(model, strategy, **settings)
    mask = placement_mask(strategy, LAYERS, EXPERTS, SLOTS, counts)
    np.testing.assert_array_equal(resident(engine), mask)
    assert answers(engine) == expected
    np.testing.assert_array_equal(resident(engine), mask)
    placed = engine.runner.moe.counts()
    assert placed.hits > 0 == placed.evictions
    assert (engine.info.policy, engine.control.expert_placement().strategy) == ("static", strategy)
    engine.control.sleep()
    engine.control.wake()
    np.testing.assert_array_equal(resident(engine), mask)
    engine.close()


def test_statistics_are_where_payback_starts_from(model: Path, expected: list[list[int]]) -> None:
    counts = model.parent / "counts.npz"
    engine = load(model, "payback", init_expert_location=str(counts))
    total = np.random.default_rng(5).integers(0, 9, (2, LAYERS, EXPERTS)).sum(axis=0)
    np.testing.assert_array_equal(
        resident(engine), placement_mask("frequency", LAYERS, EXPERTS, SLOTS, total)
    )
    assert answers(engine) == expected
    assert engine.runner.moe.counts().evictions > 0
    engine.close()


def test_another_placement_while_16_streams_run_changes_no_token(
    model: Path, engine: Engine, expected: list[list[int]]
) -> None:
    masks = [placement_mask(each, LAYERS, EXPERTS, SLOTS) for each in ("random", "front-loading")]
    masks.append(np.zeros((LAYERS, EXPERTS), np.bool_))
    hits: list[int] = []

    def change(step: int) -> None:
        if step % 4 == 3:
            mask = masks[step // 4 % 3]
            before = resident(engine)
            uploaded = engine.control.place_experts([np.flatnonzero(layer).tolist() for layer in mask])
            assert uploaded == int((mask & ~before).sum())
            np.testing.assert_array_equal(resident(engine), mask)
        hits.append(engine.runner.moe.counts().hits)

    assert answers(engine, change) == expected
    assert hits[15] == hits[11] < hits[16]  # nothing in slots, nothing hit; and an empty slot stays empty
    for requested, message in [
        ([[0]] * 2, "2 layers with experts up to 0 was given; the model has 3 layers of 8"),
        ([[8]] * 3, "experts up to 8"),
        ([[0, 1, 2, 3]] * 3, "12 experts given, at most 10 expected"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.control.place_experts(requested)


@pytest.mark.parametrize("policy", ["payback", "lru"])
def test_a_policy_starts_from_the_current_residents(
    model: Path, expected: list[list[int]], policy: str
) -> None:
    engine = load(model, "payback", policy=policy)
    left: list[int] = []

    def change(step: int) -> None:
        if step == 6:
            engine.control.place_experts([[0], [], [3, 4]])
            left.append(int(resident(engine).sum()))

    assert answers(engine, change) == expected
    assert left == [3]
    assert resident(engine).sum() > 3
    if policy == "lru":  # fixed slots for each layer: here no more than 4 and 3
        with pytest.raises(ConfigError, match="8 experts in layer 0 given, at most 4 expected"):
            engine.control.place_experts([list(range(8)), [], []])
    engine.close()


def routed(engine: Engine) -> list[Counter[int]]:
    """Routing counts per layer and expert in the last recording."""
    rows = engine.runner.moe.drain_events()["token_layer"]
    return [
        Counter(rows[rows["layer"] == layer]["experts"][:, : engine.info.top_k].ravel().tolist())
        for layer in range(LAYERS)
    ]


def test_a_long_prompt_places_experts_by_its_own_routing(model: Path, expected: list[list[int]]) -> None:
    engine = load(model, enable_dynamic_expert_update=True, gpu_prefill_token_threshold=60)
    engine.runner.moe.executor.events_enabled = True
    one = SamplingParams(max_tokens=1)
    before = resident(engine)
    engine.generate(PROMPTS[0][:59], one)
    np.testing.assert_array_equal(resident(engine), before)
    assert engine.stats().dynamic_update == {"too_few_tokens": 1}
    routed(engine)
    engine.generate(PROMPTS[15], one)
    now, counts = resident(engine), routed(engine)
    uploads = engine.runner.moe.counts().uploads
    for layer in range(LAYERS):
        held = int(before[layer].sum())  # a layer keeps as many slots as it had
        # Most tokens first; ties go to resident experts, then to the lower number.
        order = sorted(range(EXPERTS), key=lambda e: (-counts[layer][e], not before[layer, e], e))
        assert np.flatnonzero(now[layer]).tolist() == sorted(order[:held])
    moved = int((now & ~before).sum())
    assert 0 < moved <= uploads
    assert engine.runner.moe.counts().evictions == moved  # only what changed
    engine.control.drop_prefixes()
    engine.generate(PROMPTS[15], one)
    assert engine.stats().dynamic_update == {"updated": 1, "unchanged": 1, "too_few_tokens": 1}
    np.testing.assert_array_equal(resident(engine), now)
    engine.close()
    engine = load(model, enable_dynamic_expert_update=True, gpu_prefill_token_threshold=20)
    assert answers(engine) == expected
    assert engine.stats().dynamic_update["updated"] > 0
    engine.close()


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("no_accelerator", {"accelerator": "none", "gpu_experts_ratio": None}),
        ("no_slots", {"gpu_experts_ratio": 0.0}),
        ("all_resident", {"gpu_experts_ratio": 1.0}),
        ("payback_places", {"expert_placement_strategy": "payback"}),
    ],
)
def test_the_reason_of_an_inactive_dynamic_update_is_logged_once(
    model: Path, reason: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = settings.pop("expert_placement_strategy", "uniform")
    engine = load(
        model, strategy, enable_dynamic_expert_update=True, gpu_prefill_token_threshold=20, **settings
    )
    with caplog.at_level(logging.WARNING):
        for prompt in PROMPTS[:3]:
            engine.generate(prompt, SamplingParams(max_tokens=1))
    assert engine.stats().dynamic_update == {reason: 3}
    assert caplog.text.count(f"dynamic expert update is inactive ({reason})") == 1
    assert engine.control.expert_placement().dynamic_update == {reason: 3}
    engine.close()


def test_other_slots_are_filled_by_the_strategy_again(model: Path, engine: Engine) -> None:
    from twofold.api.control import Resize

    engine.control.resize(Resize(num_gpu_experts=2))
    np.testing.assert_array_equal(resident(engine), placement_mask("uniform", LAYERS, EXPERTS, 6))
    engine.control.resize(Resize(num_gpu_experts=2, gpu_experts_ratio=1.0))  # the ratio wins
    assert resident(engine).all()
