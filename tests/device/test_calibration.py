"""Calibration of a device: known figures come back, from known times and from the fake device's link."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.blocks import ops
from twofold.device.calibration import (
    LINK_BYTES,
    LayerConstants,
    LinkSample,
    Routing,
    calibrate_device,
    fit_layers,
    fit_link,
)
from twofold.device.probe import KernelProbe
from twofold.experts.calibration import Sample, random_store
from twofold.experts.profiles import COST_FIGURES, load_machine_profile, load_profile
from twofold.experts.slot_plan import MoeShape
from twofold.tools.cli.calibrate import format_device
from twofold.tools.cli.main import main
from twofold.weights.weight_format import packed_bytes

from tests.device.fake_device import FakeDevice
from tests.device.runner_runs import found_device
from tests.tiny_models.writing import TinyModel, write_tiny_model

SHAPE = MoeShape(2, 32, 4, 64, 32, (("bf16",) * 3,) * 2)


@dataclass
class KnownDevice:
    """A probe whose answers are the cost model's, with noise."""

    latency_us: float = 8.0
    link_gbps: float = 50.0
    constants: LayerConstants = field(default_factory=lambda: LayerConstants(6.0, 2.0, 0.01))
    noise: float = 0.01
    name: str = "known"
    memory_bytes: int = 24_000_000_000
    expert_bytes: int = 1_000_000
    most_tokens: int = 4096
    gbps: float = 20.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)

    def _noisy(self, us: float) -> float:
        return us * float(1 + self.noise * self._random.uniform(-1, 1))

    def copy_us(self, num_bytes: int) -> float:
        return self._noisy(self.latency_us + num_bytes / self.link_gbps / 1e3)

    def routed_us(self, routing: Routing) -> float:
        return self._noisy(self.constants.layer_us(routing.loads))

    def join_us(self) -> float:
        return 1.5

    def handshake_us(self) -> float:
        return 4.5

    @contextmanager
    def copying(self, num_bytes: int) -> Iterator[KnownDevice]:
        yield self


def test_known_figures_are_recovered_and_mixed_layers_estimated() -> None:
    found = calibrate_device(KnownDevice(), SHAPE, None, repeats=5)
    assert found.link_latency_us == pytest.approx(8.0, rel=0.03)
    assert found.link_bandwidth_gbps == pytest.approx(50.0, rel=0.02)
    assert found.gpu_launch_us == pytest.approx(6.0, rel=0.05)
    assert found.vram_bandwidth_gbps == pytest.approx(1_000_000 / 2.0 / 1e3, rel=0.03)
    assert found.gpu_gflops == pytest.approx(6 * 64 * 32 / 0.01 / 1e3, rel=0.03)
    assert found.median_error < 0.02
    assert max(s.error for s in found.link) < 0.03
    figures = found.figures(cpu_layer_us=3.0)
    assert figures["handshake_us"].value == pytest.approx(7.5)
    assert figures["join_us"].value == 1.5
    assert figures["contention"].value == 0.0
    assert all(figure.source.startswith("measured on known") for figure in figures.values())


@given(
    launch=st.floats(0.0, 30.0),
    expert=st.floats(0.2, 50.0),
    crossover=st.floats(1.5, 300.0),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_fit_of_layers_lists_its_samples(
    launch: float, expert: float, crossover: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    truth = LayerConstants(launch, expert, expert / crossover)
    loads = [(n,) * k for n in (1, 2, 4, 8, 16, 64, 256, 1024) for k in (4, 8, 16, 32)]
    samples = [Sample(load, truth.layer_us(load) * float(1 + 0.01 * random.uniform(-1, 1))) for load in loads]
    found = fit_layers(samples)
    for load in [*loads, (1, 2, 3, 40), (1, 1, 500, 7)]:
        assert found.layer_us(load) == pytest.approx(truth.layer_us(load), rel=0.05)


def test_decode_alone_calibrates_decode_and_not_arithmetic() -> None:
    truth = LayerConstants(5.0, 2.0, 0.001)
    found = fit_layers([Sample((n,) * k, truth.layer_us((n,) * k)) for n in (1, 2) for k in (4, 8, 16)])
    assert found.layer_us((1,) * 12) == pytest.approx(truth.layer_us((1,) * 12), rel=0.01)
    assert 0 < found.token_us <= found.expert_us


def test_a_link_without_latency_gets_none_and_no_negative_one() -> None:
    latency, gbps = fit_link(
        [LinkSample(n, n / 10e3 * (0.99 if n < 1e5 else 1)) for n in (50_000, 10**6, 10**7)]
    )
    assert latency >= 0
    assert gbps == pytest.approx(10.0, rel=0.02)


def test_the_table_shows_every_figure_with_its_residuals() -> None:
    table = format_device(calibrate_device(KnownDevice(), SHAPE, None, repeats=3))
    for part in (
        "known, link",
        "known, experts",
        "handshake to the CPU and back 4.50 us, join 1.50 us",
        "median",
    ):
        assert part in table
    assert table.count("%") > 40


@pytest.mark.parametrize(("bandwidth_gbps", "expert_kb"), [(2.0, 100), (40.0, 9000)])
def test_the_fake_link_has_the_figures_it_was_given(
    fake: ModuleType, bandwidth_gbps: float, expert_kb: int
) -> None:
    link = fake.open_device(0, total_bytes=1 << 29, bandwidth_gbps=bandwidth_gbps).link_probe(1 << 27)
    sizes = sorted({*LINK_BYTES, expert_kb * 1000})
    latency, gbps = fit_link([LinkSample(n, link.copies_us(n)) for n in sizes])
    assert latency == pytest.approx(10.0, rel=0.02)
    assert gbps == pytest.approx(bandwidth_gbps, rel=0.02)
    with pytest.raises(ValueError, match="at least one copy expected"):
        link.copies_us((1 << 27) + 1)


@pytest.mark.parametrize("demand", [True, False])
@pytest.mark.parametrize("refuse_pinning", [True, False])
def test_the_upload_engine_nearly_fills_the_fake_link(
    fake: ModuleType, demand: bool, refuse_pinning: bool
) -> None:
    pool = ops.ThreadPool(1)
    store = random_store(MoeShape(1, 8, 2, 512, 256, (("bf16",) * 3,)), pool)
    device = fake.open_device(0, bandwidth_gbps=10.0, refuse_pinning=refuse_pinning)
    probe = device.probe_uploads(store, 100, demand)
    assert probe["bytes"] == 100 * store.expert_bytes
    assert probe["pinned"] is not refuse_pinning
    assert probe["busy_us"] <= probe["us"] * 1.001
    assert 10.0 * 0.8 < probe["bytes"] / probe["us"] / 1e3 <= 10.0


SMALL = MoeShape(2, 8, 2, 64, 32, (("q8_0",) * 3,) * 2)


@pytest.fixture
def large(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """This machine has a device of 1 GiB, of whose layers few are timed; this opens another one."""
    monkeypatch.setattr(FakeDevice, "most_tokens", 4)
    monkeypatch.setattr("twofold.device.probe.DECODE_TOKENS", 4)
    monkeypatch.setattr("twofold.device.probe._CALLS", 2)

    def open_native() -> Any:
        return fake.open_device(0, total_bytes=1 << 30)

    with found_device(open_native):
        yield open_native


def test_the_probe_launches_layers_of_the_fake_device(large: Callable[[], Any]) -> None:
    """Times are this machine's; that each launch does what it should is for test_fake_kernels."""
    probe = KernelProbe(FakeDevice(large()), SMALL, most_tokens=33)
    assert (probe.name, probe.expert_bytes) == ("fake device", 3 * packed_bytes("q8_0", 32, 64))
    for ids in (((0, 1),), ((0, 1), (1, 2)), tuple((n % 8, (n + 1) % 8) for n in range(33))):
        assert probe.routed_us(Routing(ids)) > 0
    assert probe.join_us() > 0
    assert probe.handshake_us() > 0
    with probe.copying(1 << 20) as copied:
        pass
    assert copied.gbps >= 0


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_command_measures_the_fake_device_and_keeps_its_figures(
    large: Callable[[], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dtype: Literal["float32", "bfloat16"],
) -> None:
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=2, dtype=dtype))
    stored = tmp_path / "machine.json"
    argv = ["calibrate", str(model), "--output", str(stored), "--cpu-threads", "1", "--repeats", "1"]
    assert main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["accelerator"]
    assert printed["link_bandwidth_gbps"] == pytest.approx(10.0, rel=0.02)  # the default of the fake device
    profile = load_profile(str(stored))
    assert profile.figures["link_bandwidth_gbps"].value == printed["link_bandwidth_gbps"]
    for name in set(COST_FIGURES) - {"cpu_bandwidth_gbps", "cpu_gflops", "cpu_expert_overhead_us"}:
        assert profile.figures[name].source.startswith("measured on fake device"), name
    assert main([*argv, "--accelerator", "cuda"]) == 0
    assert "fake device, link: an upload takes" in capsys.readouterr().out
    assert main([*argv, "--accelerator", "none"]) == 0
    assert "accelerator not measured (--accelerator none)" in capsys.readouterr().out
    borrowed = load_profile(str(stored)).figures["link_bandwidth_gbps"]
    assert borrowed.source.startswith("not measured here")


def test_each_of_several_devices_is_measured_by_its_number(
    fake: ModuleType, large: Callable[[], Any], tmp_path: Path
) -> None:
    links = {0: 10.0, 1: 4.0}

    def find(index: int = 0) -> tuple[FakeDevice | None, str]:
        if index not in links:
            return None, "there is no such device, only cuda:0, cuda:1"
        return FakeDevice(fake.open_device(index, total_bytes=1 << 30, bandwidth_gbps=links[index])), ""

    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=2, dtype="bfloat16"))
    paths = [str(tmp_path / name) for name in ("first.json", "second.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twofold.device.finding.find_device", find)
        for index, path in enumerate(paths):
            argv = ["calibrate", str(model), "--output", path, "--cpu-threads", "1", "--repeats", "1"]
            assert main([*argv, "--devices", f"cuda:{index}"]) == 0
    machine = load_machine_profile("+".join(paths))
    assert machine is not None
    found = [device.figures["link_bandwidth_gbps"].value for device in machine.devices]
    assert found == pytest.approx([10.0, 4.0], rel=0.02)
    assert [device.name.rsplit("-", 1)[1] for device in machine.devices] == ["cuda0", "cuda1"]


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--devices", "cuda:0,cuda:1"], "one GPU is measured at a time"),
        (["--devices", "gpu1"], "expected GPUs such as cuda:0,cuda:1"),
        (["--devices", "cuda:7"], "--devices cuda:7: "),
        (["--devices", "cuda:0", "--accelerator", "none"], "leave one of them out"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused(
    flags: list[str], printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--output", str(tmp_path / "machine.json"), *flags]) == 2
    assert printed in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_device_measuring_one_is_refused_and_auto_uses_a_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "twofold._cuda", None)
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=1))
    stored = tmp_path / "machine.json"
    argv = ["calibrate", str(model), "--output", str(stored), "--cpu-threads", "1", "--repeats", "1"]
    assert main([*argv, "--accelerator", "cuda"]) == 2
    assert "--accelerator cuda: this build has no CUDA module" in capsys.readouterr().err
    assert main(argv) == 0
    assert "accelerator not measured (this build has no CUDA module" in capsys.readouterr().out
