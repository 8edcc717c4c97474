"""The self-check of a device: passes on the fake device for every family and format, and finds planted faults."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from twofold.blocks import ops
from twofold.blocks.gqa_device import GqaOnDevice
from twofold.blocks.router import RouterOnDevice
from twofold.device.checks import self_check
from twofold.device.checks.blocks import check_layer, layers_to_check
from twofold.device.checks.experts import check_format, expert_pair, layers_by_format
from twofold.device.checks.running import SHORT, Check, CheckLimits, CheckResult, run_checks
from twofold.device.checks.self_check import SelfCheck, check_device
from twofold.device.checks.self_check import short_checks as checks_of
from twofold.engine.packing import pack_directory
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.tools.cli.main import main
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.fake_device import FakeDevice
from tests.device.runner_runs import found_device
from tests.tiny_models.kernel_sizes import FORMATS, MODELS, QWEN
from tests.tiny_models.writing import write_tiny_model

QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss-mxfp4", "gemma4-small", "qwen3_next", "lfm2_moe", "qwen4_exp")
"""One family of each kind of blocks; the others take a minute."""
ANY_TIME = replace(SHORT, start_within_s=600.0, stuck_after_s=120.0)


def errors_of(simt: ModuleType, files: ModelFiles) -> dict[str, float]:
    """Relative errors of every expert format and every variant of a layer."""
    device, pool = FakeDevice(simt.open_device(tick_us=2.0)), ops.ThreadPool(1)
    found = [
        check_format(device, pool, functools.partial(expert_pair, files, pool, layer, formats))
        for formats, layer in layers_by_format(files).items()
    ]
    found += [check_layer(device, pool, files, layer) for layer in layers_to_check(files, every_variant=True)]
    return {name: error for figures in found for name, error in figures["relative_error"].items()}


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_every_family_passes(simt: ModuleType, tmp_path: Path, model: str) -> None:
    errors = errors_of(simt, open_model_files(write_tiny_model(tmp_path, MODELS[model])))
    assert max(errors.values()) < 0.02, errors  # measured: at most 1.2 %


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_passes(simt: ModuleType, tmp_path: Path, format: str) -> None:
    size = max(64, LAYOUTS[format].block_columns)
    source = write_tiny_model(
        tmp_path / "source", replace(QWEN, hidden_size=size, moe_intermediate_size=size)
    )
    made = tmp_path / "made"
    assert main(["quantize", str(source), str(made), "--format", format, "--max-tokens", "0"]) == 0
    errors = errors_of(simt, open_model_files(made))
    assert max(errors.values()) < 0.04, errors


def test_a_packed_model_passes(simt: ModuleType, tmp_path: Path) -> None:
    source, packed = write_tiny_model(tmp_path / "source", QWEN), tmp_path / "packed"
    assert pack_directory(open_model_files(source), source, packed, ops.ThreadPool(1))
    assert max(errors_of(simt, open_model_files(packed)).values()) < 0.02


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return open_model_files(write_tiny_model(tmp_path_factory.mktemp("model"), QWEN))


def checked(
    device: FakeDevice, files: ModelFiles, only: Sequence[str] = (), limits: CheckLimits = ANY_TIME
) -> list[CheckResult]:
    """Results of the short form, or of those of its checks whose names begin so."""
    checks = checks_of(device, files, ops.ThreadPool(1))
    chosen = [check for check in checks if not only or check.name.startswith(tuple(only))]
    return run_checks(chosen, limits)


class Native:
    """A native device with some methods replaced."""

    def __init__(self, native: Any, **replaced: Callable[..., Any]) -> None:
        self._native = native
        self._replaced = {name: functools.partial(run, native) for name, run in replaced.items()}

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._native, name)


def test_all_checks_of_the_short_form_pass(simt: ModuleType, qwen: ModelFiles) -> None:
    found = checked(FakeDevice(simt.open_device(tick_us=2.0)), qwen)
    assert [result.state for result in found] == ["passed"] * 7, found
    assert [result.name for result in found] == [
        "copy to the device and back",
        "expert uploads",
        "handshake",
        "graph replay",
        "experts in bf16",
        "blocks of layer 0 (attention, router, experts)",
        "blocks of layer 1 (attention, dense)",
    ]


def test_an_upload_that_does_not_arrive_is_found(simt: ModuleType, qwen: ModelFiles) -> None:
    device = FakeDevice(simt.open_device(tick_us=2.0, fail_completion=1.0))
    (found,) = checked(device, qwen, ["expert uploads"])
    assert found.state == "failed"


def test_a_handshake_that_never_answers_is_found(simt: ModuleType, qwen: ModelFiles) -> None:
    def place(native: Any, *given: Any, mailbox: Any, **named: Any) -> None:
        native.place(*given, mailbox=None, **named)  # posts nothing

    device = FakeDevice(Native(simt.open_device(tick_us=2.0), place=place))
    (found,) = checked(device, qwen, ["handshake"])
    assert found.state == "failed"
    assert found.seconds < 30


def test_a_wrong_expert_is_found(simt: ModuleType, qwen: ModelFiles) -> None:
    def decode(native: Any, layout: Any, groups: Any, buffers: Any, bounds: Any, stream: int) -> None:
        pass  # computes nothing

    device = FakeDevice(Native(simt.open_device(tick_us=2.0), decode_experts=decode))
    (found,) = checked(device, qwen, ["experts in"])
    assert found.state == "failed"
    assert "decode differs from the CPU's result by" in found.problem


@pytest.mark.parametrize(("block", "unit"), [(GqaOnDevice, "Gqa"), (RouterOnDevice, "Router, RoutedExperts")])
def test_a_wrong_block_is_found(
    simt: ModuleType, qwen: ModelFiles, monkeypatch: pytest.MonkeyPatch, block: type, unit: str
) -> None:
    forward = block.forward  # type: ignore[attr-defined]

    def wrong(self: Any, hidden: torch.Tensor, *rest: Any) -> None:
        forward(self, hidden.roll(1, 0), *rest)

    monkeypatch.setattr(block, "forward", wrong)
    (found, *_) = checked(FakeDevice(simt.open_device(tick_us=2.0)), qwen, ["blocks"])
    assert found.state == "failed"
    assert found.problem.startswith(f"{unit}, ")


def test_a_graph_that_replays_something_else_is_found(simt: ModuleType, qwen: ModelFiles) -> None:
    class OneReplay(FakeDevice):
        def graph(self, run: Callable[[], object]) -> Callable[[], None]:
            runs = iter([run])
            return lambda: next(runs, lambda: None)() and None  # type: ignore[func-returns-value]

    device = OneReplay(simt.open_device(tick_us=2.0))
    (found,) = checked(device, qwen, ["graph replay"])
    assert found.state == "failed"


def test_a_graph_of_blocks_that_computes_nothing_is_found(simt: ModuleType, qwen: ModelFiles) -> None:
    class NoReplay(FakeDevice):
        def graph(self, run: Callable[[], object]) -> Callable[[], None]:
            return lambda: None

    (found, *_) = checked(NoReplay(simt.open_device(tick_us=2.0)), qwen, ["blocks"])
    assert found.state == "failed"
    assert found.problem.startswith("Gqa, graph differs")


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hanging() -> Iterator[Callable[[], dict[str, Any]]]:
    """A check that does not return before the test has ended."""
    ended = threading.Event()

    def hang() -> dict[str, Any]:
        ended.wait()
        return {}

    yield hang
    ended.set()


def nothing() -> dict[str, Any]:
    return {}


def test_a_check_that_never_returns_is_stuck_and_no_later_one_runs(
    hanging: Callable[[], dict[str, Any]],
) -> None:
    checks = [Check("first", nothing), Check("second", hanging), Check("third", nothing)]
    found = run_checks(checks, replace(SHORT, stuck_after_s=0.05))
    assert [result.state for result in found] == ["passed", "stuck", "not run"]
    failure = SelfCheck("cuda:0", tuple(found)).describe_failure()
    assert "cuda:0 never returned from the self-check “second”" in failure


def test_a_check_that_cannot_start_in_time_is_not_run_and_is_no_failure() -> None:
    def late() -> dict[str, Any]:
        time.sleep(0.02)
        return {}

    found = run_checks([Check("late", late), Check("later", nothing)], replace(SHORT, start_within_s=0.01))
    assert [result.state for result in found] == ["passed", "not run"]
    assert SelfCheck("cuda:0", tuple(found)).failed is None


def test_the_long_form_continues_after_a_failure(
    simt: ModuleType, qwen: ModelFiles, monkeypatch: Any
) -> None:
    def fail(device: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error: misaligned address\nmore lines")

    monkeypatch.setattr(self_check, "copy_both_ways", fail)
    device = FakeDevice(simt.open_device(tick_us=2.0))
    found = check_device(device, qwen, ops.ThreadPool(1), name="cuda:0", long=True)
    states = {result.name: result.state for result in found.results}
    assert states.pop("copy to the device and back") == "failed"
    assert set(states.values()) == {"passed"}
    assert found.results[0].problem == "RuntimeError: CUDA error: misaligned address"


def test_a_handshake_that_the_device_lacks_is_not_run(simt: ModuleType, qwen: ModelFiles) -> None:
    def probe(native: Any, hidden: int) -> dict[str, Any]:
        lacking = {"kind": "stream-memory", "works": False, "us": 0.0, "why": "not supported"}
        return {"probes": [lacking], "kind": "kernels", "reason": ""}

    device = FakeDevice(Native(simt.open_device(tick_us=2.0), probe_handshakes=probe))
    found = check_device(device, qwen, ops.ThreadPool(1), name="cuda:0", long=True)
    assert {result.name: result.problem for result in found.results if result.state == "not run"} == {
        "handshake by stream-memory": "not supported",
        "graph replay by stream-memory": "not supported",
    }
    assert found.failed is None


# ---- doctor --gpu ----------------------------------------------------------------------------------------------------


def test_doctor_writes_a_report(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_tiny_model(tmp_path / "model", QWEN)
    with found_device(lambda: fake.open_device(0, tick_us=2.0)):
        assert main(["doctor", "--gpu", str(model), "--cpu-threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "passed   handshake by stream-memory" in printed
    assert "twofold-gpu-report.json; if a check failed, attach this file" in printed
    report = json.loads((tmp_path / "twofold-gpu-report.json").read_text())
    assert report["model"] == "model"
    assert torch.__version__.startswith(report["torch"].partition("+")[0])
    (device,) = report["devices"]
    figures = {check["name"]: check["figures"] for check in device["checks"]}
    assert figures["bandwidths"]["to_device_gbps"] > 0
    assert figures["experts in bf16"]["relative_error"]["decode"] < 0.01


def test_doctor_without_a_device_reports_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "there is nothing to check" in error
