"""Machine profiles: the shipped ones are complete and sourced, damaged ones are refused by name."""

from __future__ import annotations

import json

import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.finding import choose_accelerator
from twofold.experts.accelerator import num_slots
from twofold.experts.profiles import COST_FIGURES, load_profile, shipped_profiles


def test_the_three_machines_are_there():
    assert shipped_profiles() == ("h200-pcie5", "rtx3060-pcie3", "rtx4090-pcie4")


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_figure_of_a_shipped_profile_has_a_source(name):
    profile = load_profile(name)
    assert set(COST_FIGURES) <= set(profile.figures)
    assert all(len(figure.source) > 15 for figure in profile.figures.values())
    # What the design rests on: VRAM is faster than host memory, which is faster than the link.
    cost = profile.cost_figures
    assert cost["vram_bandwidth_gbps"] > cost["cpu_bandwidth_gbps"] > cost["link_bandwidth_gbps"]


def damaged(change):
    content = {
        "format": "twofold-machine-profile",
        "version": 2,
        "name": "x",
        "figures": {name: {"value": 1.0, "source": "made up here"} for name in COST_FIGURES},
    }
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["figures"].pop("cpu_gflops"), ["lacks cpu_gflops"]),
        (lambda c: c["figures"].update(speed={"value": 1, "source": "s"}), ["unknown speed"]),
        (lambda c: c["figures"]["join_us"].update(value=-1), ["join_us", "-1", "not negative"]),
        (lambda c: c["figures"]["join_us"].update(value=float("nan")), ["join_us", "nan"]),
        (lambda c: c["figures"]["join_us"].update(value=True), ["join_us", "True"]),
        (lambda c: c["figures"]["join_us"].pop("source"), ["join_us", "source"]),
        (lambda c: c["figures"]["link_bandwidth_gbps"].update(value=0), ["link_bandwidth_gbps", "0"]),
        (lambda c: c.update(version=9), ["version 9", "version 2", "twofold calibrate"]),
        (lambda c: c.update(format="other"), ["not a machine profile"]),
        (lambda c: c.pop("figures"), ["figures"]),
    ],
)
def test_a_damaged_profile_is_refused_with_its_path_and_the_figure(tmp_path, change, words):
    path = tmp_path / "machine.json"
    path.write_text(damaged(change))
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_profile(str(path))


def test_an_unknown_profile_names_the_shipped_ones():
    with pytest.raises(ConfigError, match="rtx4090-pcie4"):
        choose_accelerator("emulated:gtx285")


def test_nothing_is_emulated_unless_asked_for():
    assert choose_accelerator("auto")[0].kind != "emulated"
    chosen, _ = choose_accelerator("emulated:rtx3060-pcie3")
    assert (chosen.kind, chosen.label, chosen.clock) == ("emulated", "emulated:rtx3060-pcie3", "virtual")
    assert choose_accelerator("none")[0].clock == "wall"


def test_an_unknown_accelerator_names_the_valid_ones():
    with pytest.raises(ConfigError, match=r"'tpu'.*auto, cuda, none or emulated:PROFILE"):
        choose_accelerator("tpu")


@pytest.mark.parametrize(
    ("config", "slots"),
    [
        (EngineConfig(), 48),
        (EngineConfig(gpu_experts_ratio=0.0), 0),
        (EngineConfig(gpu_experts_ratio=1.0), 192),
        (EngineConfig(num_gpu_experts=3), 18),
        (EngineConfig(moe_cache_mib=10), 20),  # of half a MiB
        (EngineConfig(moe_cache_mib=0), 0),
        (EngineConfig(moe_cache_mib=1000), 192),
    ],
)
def test_slots_follow_the_ratio_or_the_number_per_layer(config, slots):
    assert num_slots(config, num_layers=6, num_experts=32, slot_bytes=2**19) == slots


def test_more_slots_than_experts_are_refused():
    with pytest.raises(ConfigError, match=r"33.*32 experts"):
        num_slots(EngineConfig(num_gpu_experts=33), 6, 32, 2**19)
