"""Machines of several devices: joined profiles, shares of the slots."""

from __future__ import annotations

import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.experts.device_split import check_devices, device_split, split_slots
from twofold.experts.profiles import HOST_FIGURES, load_profile

PAIR = load_profile("rtx3060-pcie3+rtx4090-pcie4")


def test_joined_profiles_share_the_first_ones_host_and_begin_with_the_fastest_device():
    assert [device.name for device in PAIR.devices] == ["rtx4090-pcie4", "rtx3060-pcie3"]
    assert PAIR.name == "rtx4090-pcie4+rtx3060-pcie3"
    for device in PAIR.devices:
        alone = load_profile(device.name)
        for name, figure in device.figures.items():
            host = load_profile("rtx3060-pcie3")
            assert figure == (host if name in HOST_FIGURES else alone).figures[name]


@pytest.mark.parametrize(
    ("text", "expected"), [(None, (24 / 36, 12 / 36)), ("3,1", (0.75, 0.25)), ("0,1", (0.0, 1.0))]
)
def test_slots_are_split_by_vram_or_as_configured(text, expected):
    assert device_split(text, PAIR) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "3;1", "1,-1", "0,0", "nan,1", "3,1,1", "1"])
def test_a_split_that_does_not_fit_is_refused(text):
    with pytest.raises(ConfigError, match="--tensor-split"):
        device_split(text, PAIR)


@pytest.mark.parametrize(
    ("num_slots", "shares", "most", "expected"),
    [
        (10, (0.75, 0.25), 100, [8, 2]),
        (10, (1.0,), 100, [10]),
        (90, (0.9, 0.1), 60, [60, 30]),
        (5, (0.0, 1.0), 100, [0, 5]),
    ],
)
def test_slots_of_each_device(num_slots, shares, most, expected):
    assert split_slots(num_slots, shares, most) == expected


@pytest.mark.parametrize("num_devices", [0, 1])
def test_a_split_of_one_device_is_refused(num_devices):
    with pytest.raises(ConfigError, match="was given with one device"):
        check_devices(EngineConfig(model="m", tensor_split="3,1"), num_devices)


def test_too_many_devices_are_refused():
    with pytest.raises(ConfigError, match="9 devices were given; at most 8"):
        load_profile("+".join(["rtx4090-pcie4"] * 9))
