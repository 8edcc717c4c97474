"""Calibration: the fit recovers what it was made from, profiles survive their file, predictions reach telemetry."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.experts.calibration import (
    Calibration,
    LayerTimer,
    Sample,
    calibrate,
    fit,
    predict,
    random_matrix,
    to_profile,
)
from twofold.experts.profiles import CpuCurve, load_machine_profile, load_profile
from twofold.experts.slot_plan import MoeShape
from twofold.telemetry.sink import TelemetrySink
from twofold.tools.cli.calibrate import format_calibration
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, write_tiny_model

EMPTY = CpuCurve("f32", 64, 32, 2, 0.0, ())


@given(
    fixed=st.floats(0.5, 50),
    steps=st.lists(st.floats(0.1, 40), min_size=4, max_size=4),
    noise=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_the_fit_recovers_a_known_machine_from_noisy_times(fixed, steps, noise):
    random = np.random.default_rng(noise)
    truth = dict(zip((1, 4, 16, 64), np.cumsum(steps), strict=True))
    samples = [
        Sample((n,) * k, (fixed + k * truth[n]) * float(1 + 0.02 * random.uniform(-1, 1)))
        for n in truth
        for k in (1, 2, 4, 8, 16)
    ]
    curve = fit(samples, EMPTY)
    for n in truth:
        for k in (1, 3, 16):
            assert predict(curve, (n,) * k) == pytest.approx(fixed + k * truth[n], rel=0.06)
    assert predict(curve, (1, 64)) == pytest.approx(curve.layer_us + curve.points[0][1] + curve.points[3][1])


def test_noise_never_makes_more_tokens_cheaper_nor_anything_negative():
    samples = [Sample((n,) * k, us * k) for n, us in ((1, 5.0), (2, 4.0), (4, 9.0)) for k in (1, 2)]
    curve = fit(samples, EMPTY)
    times = [us for _, us in curve.points]
    assert times == sorted(times)
    assert curve.layer_us >= 0


@pytest.mark.parametrize("formats", [("f32",) * 3, ("q8_0", "q8_0", "f16")])
def test_a_real_calibration_estimates_unmeasured_layers(formats):
    """Wide bounds: this machine may be busy. What is sharp is that the fit is of these very measurements."""
    calibration = calibrate(MoeShape(2, 8, 2, 64, 32, (formats,) * 2), 1, repeats=5)
    assert calibration.curve.threads == 1
    assert all(s.measured_us > 0 and s.predicted_us > 0 for s in calibration.unseen)
    assert calibration.median_error < 1.0
    loads = (1,) * 8
    assert predict(calibration.curve, loads) == pytest.approx(
        calibration.curve.layer_us + 8 * calibration.curve.points[0][1]
    )
    table = format_calibration(calibration)
    assert "8 x" not in table
    assert f"{calibration.curve.format}, 64 x 32" in table
    assert calibration.curve.format == ("f32" if formats[0] == "f32" else "q8_0/q8_0/f16")


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_timed_layers_have_the_rows_and_the_loads_of_real_ones(data):
    """A router names top-k different experts for a row; loads that allow it are timed so."""
    shape = MoeShape(1, 8, 2, 64, 32, (("f32",) * 3,))
    timer = LayerTimer(shape, ops.ThreadPool(1))
    num_rows = data.draw(st.integers(1, 20))
    routed = [data.draw(st.permutations(range(8)))[:2] for _ in range(num_rows)]
    counts = np.bincount(np.concatenate(routed))
    loads = tuple(int(n) for n in counts[counts > 0])
    ids = timer._routing(loads)
    assert ids.shape == (num_rows, 2)
    assert all(len(set(row)) == 2 for row in ids)
    assert sorted(np.bincount(ids.ravel())[np.unique(ids)]) == sorted(loads)
    assert timer._routing((3,)).shape == (3, 1), "one expert alone: a row for each pair"


def example(threads=1) -> Calibration:
    curve = CpuCurve("f32", 64, 32, threads, 3.0, ((1, 2.0), (8, 10.0)))
    sample = Sample((1, 1), 7.0, 7.0)
    return Calibration(curve, 4096, (sample,), (sample,), {1: 7.0}, 0.1, 5.0)


def test_no_product_of_measured_floats_is_subnormal():
    matrix = random_matrix(np.random.default_rng(0), "bf16", 64, 64)
    assert np.abs(ops.dequantise(ops.ThreadPool(1), matrix)).min() > 1e-5


def test_a_profile_survives_its_file_and_lists_what_was_not_measured(tmp_path):
    profile = to_profile(example(), load_profile("rtx3060-pcie3"))
    path = tmp_path / "machine.json"
    path.write_text(profile.to_json())
    assert load_profile(str(path)) == profile
    assert profile.figures["link_bandwidth_gbps"].source.startswith("not measured here, from rtx3060-pcie3")
    assert profile.figures["contention"].value == 0.1
    assert profile.cpu_curve("f32", 64, 32, 1) is not None
    assert profile.cpu_curve("f32", 64, 32, 2) is None, "another number of threads is another curve"


def test_curves_of_other_experts_and_threads_are_kept():
    base = load_profile("rtx3060-pcie3")
    stored = to_profile(example(threads=1), base)
    both = to_profile(example(threads=2), base, stored=stored)
    assert [curve.threads for curve in both.cpu_curves] == [2, 1]
    again = to_profile(example(threads=1), base, stored=both)
    assert [curve.threads for curve in again.cpu_curves] == [1, 2], (
        "the same experts: measured again, not twice"
    )


def test_a_damaged_profile_is_replaced_with_a_warning(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=1))
    output = tmp_path / "machine.json"
    output.write_text("{}")
    argv = ["calibrate", str(model), "--output", str(output), "--cpu-threads", "1", "--repeats", "1"]
    assert main([*argv, "--accelerator", "none"]) == 0
    assert "it is replaced" in capsys.readouterr().err
    assert len(load_profile(str(output)).cpu_curves) == 1


def test_a_curve_of_the_kernels_before_formats_is_left_out(tmp_path):
    content = json.loads(to_profile(example(), load_profile("rtx3060-pcie3")).to_json())
    curve = content["cpu_curves"][0]
    curve["dtype"] = curve.pop("format")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    assert load_profile(str(path)).cpu_curves == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(points=[]),
        lambda c: c.update(points=[[2, 1.0], [1, 2.0]]),
        lambda c: c.update(points=[[1, -1.0]]),
        lambda c: c.update(points=[[1, "fast"]]),
        lambda c: c.update(points="none"),
        lambda c: c.update(threads=0),
        lambda c: c.update(layer_us=float("inf")),
        lambda c: c.pop("layer_us"),
        lambda c: c.update(extra=1),
    ],
)
def test_a_damaged_curve_is_refused(tmp_path, change):
    content = json.loads(to_profile(example(), load_profile("rtx3060-pcie3")).to_json())
    change(content["cpu_curves"][0])
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"cpu_curves\[0\]"):
        load_profile(str(path))


def test_without_a_stored_profile_there_is_none_and_a_stored_one_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_machine_profile(None) is None
    (tmp_path / "twofold").mkdir()
    profile = to_profile(example(), load_profile("rtx3060-pcie3"))
    (tmp_path / "twofold" / "machine.json").write_text(profile.to_json())
    assert load_machine_profile(None) == profile


def test_the_command_stores_a_profile_that_the_engine_uses(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=2))
    stored = tmp_path / "new" / "machine.json"
    argv = [
        "calibrate",
        str(model),
        "--output",
        str(stored),
        "--cpu-threads",
        "1",
        "--repeats",
        "3",
        "--json",
    ]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["profile"] == str(stored)

    class Rows(TelemetrySink):
        def __init__(self):
            self.rows = []

        def native_events(self, kind, rows):
            if kind == "token_layer":
                self.rows.append(rows.copy())

    for profile, predicts in ((str(stored), True), ("rtx4090-pcie4", False)):
        sink = Rows()
        config = EngineConfig(model=str(model), accelerator="none", cpu_threads=1, machine_profile=profile)
        engine = Engine.load(config, telemetry=sink)
        engine.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
        engine.close()
        predicted = np.concatenate(sink.rows)["predicted_us"]
        assert np.all(predicted > 0) == predicts, "no curve of this shape, no prediction"


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=1))
    blocker = tmp_path / "file"
    blocker.write_text("")
    argv = [
        "calibrate",
        str(model),
        "--output",
        str(blocker / "m.json"),
        "--cpu-threads",
        "1",
        "--repeats",
        "1",
    ]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "m.json" in error
    assert error.count("\n") == 1
