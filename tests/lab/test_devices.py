"""Machines of several devices in `twofold lab simulate`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from twofold.experts.profiles import load_profile
from twofold.tools.cli.main import main
from twofold.tools.lab.devices import Steps, layer_shares, static_split, systems_of_devices
from twofold.tools.lab.shapes import SHAPES
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import load_trace

SHAPE = SHAPES["gpt-oss-20b"]
PAIRS = ("rtx4090-pcie4+rtx3060-pcie3", "rtx3060-pcie3+rtx4090-pcie4", "rtx4090-pcie4+rtx4090-pcie4")


@pytest.mark.parametrize("steps", [Steps(), Steps(batch=4), Steps(prompt_chunk=64)])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("slots", "split"), [(32, (0.5, 0.5)), (64, (0.8, 0.2)), (64, (0.2, 0.8))])
def test_all_devices_are_never_slower_than_the_better_one(trace_file, pair, steps, slots, split):
    trace = load_trace(trace_file)
    played, prior = trace.part("second"), trace.part("first").usage()
    found = {
        name: result.num_tokens / result.total_us
        for name, _, result in systems_of_devices(
            played, SHAPE, load_profile(pair), num_slots=slots, split=split, steps=steps, prior_usage=prior
        )
    }
    union = found.pop("twofold")
    assert len(found) == 3
    assert union >= max(found.values()), found


@pytest.mark.parametrize("steps", [Steps(), Steps(batch=4), Steps(prompt_chunk=64)])
@pytest.mark.parametrize("pair", ["h200-pcie5+rtx3060-pcie3", PAIRS[0]])
@pytest.mark.parametrize(("slots", "split"), [(256, (0.5, 0.5)), (128, (0.95, 0.05)), (128, (0.9, 0.1))])
def test_a_rarely_needed_card_costs_nothing(long_trace_file, pair, steps, slots, split):
    """The first card holds all experts, or nearly all: moves between the cards gain little there."""
    trace = load_trace(long_trace_file)
    both, first, second, _ = (
        result.num_tokens / result.total_us
        for _, _, result in systems_of_devices(
            trace.part("second"),
            SHAPE,
            load_profile(pair),
            num_slots=slots,
            split=split,
            steps=steps,
            prior_usage=trace.part("first").usage(),
        )
    )
    assert both >= 0.999 * max(first, second), both / max(first, second)


@pytest.mark.parametrize("steps", [Steps(), Steps(batch=4), Steps(prompt_chunk=64)])
def test_a_second_card_without_slots_makes_nothing_slower(long_trace_file, steps):
    """What it fetches passes through its staging slots; the first card's slots lose nothing by it."""
    trace = load_trace(long_trace_file)
    both, first, _, _ = (
        (result.total_us, result.num_uploads)
        for _, _, result in systems_of_devices(
            trace.part("second"),
            SHAPE,
            load_profile("h200-pcie5+rtx3060-pcie3"),
            num_slots=64,
            split=(1.0, 0.0),
            steps=steps,
            prior_usage=trace.part("first").usage(),
        )
    )
    assert both[0] <= first[0]
    assert first[1] > 0


def test_a_static_split_of_equal_devices_is_one_static_device(trace_file):
    """Two equal cards one after the other, each with its share of slots and layers, are as fast as one with all."""
    trace = load_trace(trace_file)
    usage = np.ones((trace.num_layers, trace.num_experts))
    usage[:, :8] = 2  # each layer has its eight slots
    machine = load_profile("rtx4090-pcie4+rtx4090-pcie4")
    split = static_split(trace, SHAPE, machine, [16, 16], Steps(), usage.ravel().tolist())
    one = simulate_system(
        trace,
        SYSTEMS["ktransformers"],
        SHAPE,
        load_profile("rtx4090-pcie4"),
        slots=0.25,
        prior_usage=usage.ravel().tolist(),
    )
    assert (split.num_hits, split.num_cpu, split.num_uploads) == (one.num_hits, one.num_cpu, 0)
    assert split.total_us == pytest.approx(one.total_us)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([3, 1], [range(3), range(3, 4)]), ([1, 0], [range(4), range(4, 4)]), ([0, 0], [range(2), range(2, 4)])],
)
def test_layers_follow_slots(slots, expected):
    assert layer_shares(4, slots) == expected


def test_the_command_compares_the_devices(trace_file, synthetic_model, capsys):
    arguments = [
        "lab",
        "simulate",
        str(trace_file),
        "--model",
        synthetic_model,
        "--slots",
        "0.5",
        "--profile",
    ]
    assert main([*arguments, PAIRS[0], "--tensor-split", "3,1"]) == 0
    out = capsys.readouterr().out
    assert "device 1 alone: rtx3060-pcie3" in out
    assert "static split by layers" in out
    assert main([*arguments, PAIRS[0], "--tensor-split", "3,1,1"]) == 2
    assert "has 3 shares; the machine has 2 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--systems", "fiddler"],
        ["--policy", "lru"],
        ["--price", "0.5"],
        ["--no-stream-ahead"],
        ["--num-deferred-experts", "2"],
        ["--acceptance", "0.5"],
    ],
)
def test_every_option_works_with_several_cards(flags, trace_file, synthetic_model, capsys):
    def rows(profile):
        model = ["--model", str(synthetic_model), "--profile", profile, "--slots", "0.25"]
        assert main(["lab", "simulate", str(trace_file), *model, *flags, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {
            (row["system"], row.get("depth")): row["tokens_per_s"]
            for row in found
            if "alone" not in row["system"] and "static split" not in row["system"]
        }

    one, pair = rows(PAIRS[0].split("+")[0]), rows(PAIRS[0])
    assert pair.keys() == one.keys()
    assert all(pair[key] > 0.8 * one[key] for key in one), (one, pair)
