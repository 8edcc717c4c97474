"""What fills slots at the start: every mask by hand, `frequency` against brute force, `random` against torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.experts.accelerator import num_slots
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.placement import (
    STRATEGIES,
    InitialPlacement,
    check_placement,
    initial_placement,
    placement_mask,
)
from twofold.experts.placement_files import read_placement, write_placement

COUNTS = np.array([[9, 1, 1, 5], [0, 2, 2, 2], [7, 0, 0, 2]])


@pytest.mark.parametrize(
    ("strategy", "slots", "expected"),
    [
        ("uniform", 0, "....|....|...."),
        ("uniform", 6, "##..|##..|##.."),
        ("uniform", 8, "###.|###.|##.."),  # uneven: the first layers have one more
        ("uniform", 1, "#...|....|...."),
        ("uniform", 12, "####|####|####"),
        ("uniform", 99, "####|####|####"),  # more slots than experts
        ("front-loading", 0, "....|....|...."),
        ("front-loading", 5, "####|#...|...."),
        ("front-loading", 99, "####|####|####"),
        ("frequency", 0, "....|....|...."),
        ("frequency", 3, "#..#|....|#..."),  # one top-k of all: layer 1 has none
        ("frequency", 5, "#..#|.##.|#..."),  # four are counted twice: the first two
        ("frequency", 8, "##.#|.###|#..#"),  # two are counted once: the lower number
        ("frequency", 99, "####|####|####"),
        ("random", 0, "....|....|...."),
        ("random", 99, "####|####|####"),
    ],
)
def test_masks_by_hand(strategy: str, slots: int, expected: str) -> None:
    mask = placement_mask(strategy, 3, 4, slots, COUNTS)
    assert "|".join("".join(".#"[cell] for cell in layer) for layer in mask.astype(int)) == expected


def test_frequency_is_one_sorted_list_over_all_layers() -> None:
    draw = np.random.default_rng(3)
    for _ in range(40):
        layers, experts = draw.integers(1, 6), draw.integers(1, 9)
        counts = draw.integers(0, 4, (layers, experts))  # many ties
        slots = int(draw.integers(0, layers * experts + 3))
        cells = [(layer, expert) for layer in range(layers) for expert in range(experts)]
        best = sorted(cells, key=lambda cell: (-counts[cell], cell))[:slots]
        mask = placement_mask("frequency", layers, experts, slots, counts)
        assert sorted(best) == [(layer, expert) for layer, expert in zip(*np.nonzero(mask), strict=True)]


@pytest.mark.parametrize(("layers", "experts", "slots"), [(1, 1, 1), (3, 4, 5), (48, 128, 1536)])
def test_random_is_what_torch_draws(layers: int, experts: int, slots: int) -> None:
    order = torch.randperm(layers * experts, generator=torch.Generator().manual_seed(42))
    expected = torch.zeros(layers * experts, dtype=torch.bool)
    expected[order[:slots]] = True
    mask = placement_mask("random", layers, experts, slots)
    np.testing.assert_array_equal(mask, expected.reshape(layers, experts).numpy())


def test_the_ratio_overrides_the_number(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(num_gpu_experts=1, gpu_experts_ratio=0.5)
    assert num_slots(config, 3, 4, 2**19) == 6
    with caplog.at_level(logging.WARNING):
        check_placement(config)
    assert "--num-gpu-experts 1 is ignored: --gpu-experts-ratio 0.5" in caplog.text


def test_statistics_fill_slots_and_another_models_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "counts.pt")
    write_statistics(path, COUNTS[None])

    def mask(moe_layers: list[int], experts: int, strategy: str = "frequency") -> Any:
        config = EngineConfig(expert_placement_strategy=strategy, init_expert_location=path)
        return initial_placement(config, moe_layers, experts).mask(len(moe_layers), experts, 3)

    np.testing.assert_array_equal(mask([0, 1, 2], 4), placement_mask("frequency", 3, 4, 3, COUNTS))
    np.testing.assert_array_equal(mask([0, 1, 2], 4, "payback"), mask([0, 1, 2], 4))
    with pytest.raises(ConfigError, match="counts 3 layers of 4 experts, the model has 2 layers of 8"):
        mask([1, 2], 8)
    assert initial_placement(EngineConfig(), [0], 4).mask(1, 4, 2) is None
    # A policy whose layers have slots of their own, here 2, 1 and 1: the most counted of each.
    even = InitialPlacement("payback", COUNTS).mask(3, 4, 4, is_pool=False)
    assert even is not None
    assert [np.flatnonzero(layer).tolist() for layer in even] == [[0, 3], [1], [0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_placement_strategy": "frequency"}, "record one with --record-gpu-expert-distribution"),
        ({"expert_placement_strategy": "uniform", "policy": "lru"}, "no expert moves by a policy"),
        ({"expert_placement_strategy": "uniform", "prefetch": "on"}, "no expert moves"),
        ({"expert_placement_strategy": "random", "cache_state": "x"}, "--cache-state was given with"),
        ({"enable_dynamic_expert_update": True, "gpu_prefill_token_threshold": 4096}, "has no effect"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_placement(EngineConfig(**settings))


def test_the_configuration_lists_every_strategy() -> None:
    for strategy in STRATEGIES:
        EngineConfig(expert_placement_strategy=strategy)


def test_a_placements_file_round_trips_and_is_statistics_too(tmp_path: Path) -> None:
    mask = placement_mask("frequency", 3, 4, 5, COUNTS)
    write_placement(tmp_path / "a.npz", mask, "tiny")
    found, kind = read_placement(tmp_path / "a.npz")
    assert kind == "placement"
    np.testing.assert_array_equal(found, mask)
    config = EngineConfig(expert_placement_strategy="frequency", init_expert_location=str(tmp_path / "a.npz"))
    np.testing.assert_array_equal(initial_placement(config, range(3), 4).mask(3, 4, 5), mask)
    write_statistics(tmp_path / "b.npz", COUNTS)
    assert read_placement(tmp_path / "b.npz")[1] == "statistics"
    for name, content in [
        ("c.npz", b"PK\x03\x04 cut"),
        ("d", b"TWFCACH1 cut"),
        ("e", b""),
        ("f", b"\x80pickle"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: (cannot be read|ends early)"):
            read_placement(tmp_path / name)
