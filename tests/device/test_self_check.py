"""The self-check of a device: passes on the fake device for every family and format, and finds planted faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from twofold.blocks import ops
from twofold.device.checks.running import CheckResult
from twofold.device.checks.self_check import SelfCheck, check_device
from twofold.models.model_files import open_model_files
from twofold.tools.cli.main import main
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.fake_device import FakeDevice
from tests.device.test_simt_engine import FORMATS, MODELS, QWEN
from tests.tiny_models.writing import write_tiny_model


def states(found: SelfCheck) -> dict[str, list[str]]:
    """Names of the checks by state."""
    return {
        state: [result.name for result in found.results if result.state == state]
        for state in {result.state for result in found.results}
    }


def errors(results: tuple[CheckResult, ...]) -> dict[str, float]:
    return {
        f"{result.name}: {what}": error
        for result in results
        for what, error in result.figures.get("relative_error", {}).items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_family_passes(simt: ModuleType, tmp_path: Path, model: str) -> None:
    path = write_tiny_model(tmp_path, MODELS[model])
    device = FakeDevice(simt.open_device(tick_us=2.0))
    found = check_device(device, open_model_files(path), ops.ThreadPool(1), name="cuda:0", long=True)
    assert set(states(found)) == {"passed"}, found.results
    # Measured: at most 1 %.
    assert max(errors(found.results).values()) < 0.02, errors(found.results)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_passes(simt: ModuleType, tmp_path: Path, format: str) -> None:
    size = max(64, LAYOUTS[format].block_columns)
    source = write_tiny_model(
        tmp_path / "source", replace(QWEN, hidden_size=size, moe_intermediate_size=size)
    )
    made = tmp_path / "made"
    assert main(["quantize", str(source), str(made), "--format", format, "--max-tokens", "0"]) == 0
    device = FakeDevice(simt.open_device(tick_us=2.0))
    found = check_device(device, open_model_files(made), ops.ThreadPool(1), name="cuda:0", long=True)
    assert set(states(found)) == {"passed"}, found.results
    assert max(errors(found.results).values()) < 0.03, errors(found.results)
