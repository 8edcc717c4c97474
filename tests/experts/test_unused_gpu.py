"""A GPU that is not used: the reason, its remedy, and where both are reported."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import twofold
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.finding import choose_accelerator
from twofold.engine import Engine
from twofold.tools.cli.main import main

from scripts import run_stack
from tests.tiny_models.writing import TinyModel, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NO_NVCC = {"problem": "nvcc is neither on PATH nor under CUDA_HOME", "remedy": "run `make build PROFILE=run`"}
OLD_DRIVER = "CUDA driver version is insufficient for CUDA runtime version"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose nvidia-smi lists a GPU."""
    program = tmp_path / "smi/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-0)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def left_out(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A build that left CUDA out and kept the reason."""
    patch.setitem(sys.modules, "twofold._cuda", None)
    patch.setattr(_core, "__file__", str(folder / "_core.so"))
    (folder / "cuda_missing.json").write_text(json.dumps(NO_NVCC))


def left_out_silently(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "twofold._cuda", None)
    patch.setattr(_core, "__file__", str(folder / "_core.so"))


def broken(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.delitem(sys.modules, "twofold._cuda", raising=False)
    patch.setattr(twofold, "__path__", [str(folder), *twofold.__path__])
    (folder / "_cuda.py").write_text("raise ImportError('undefined symbol: f')\n")


def with_module(patch: pytest.MonkeyPatch, *devices: int) -> None:
    module = SimpleNamespace(
        devices=lambda: [{"index": index} for index in devices],
        why_no_device=lambda: f"{OLD_DRIVER}; update the NVIDIA driver",
    )
    patch.setitem(sys.modules, "twofold._cuda", module)


def old_driver(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    with_module(patch)


def torch_without_cuda(patch: pytest.MonkeyPatch, _folder: Path) -> None:
    with_module(patch, 0)
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.version, "cuda", None)


def old_driver_for_torch(patch: pytest.MonkeyPatch, folder: Path) -> None:
    torch_without_cuda(patch, folder)
    patch.setattr(torch.version, "cuda", "13.2")


CAUSES: list[tuple[Callable[[pytest.MonkeyPatch, Path], None], str, str]] = [
    (left_out, f"this build has no CUDA module: {NO_NVCC['problem']}", NO_NVCC["remedy"]),
    (left_out_silently, "this build has no CUDA module", "build it on this machine"),
    (broken, "twofold._cuda is there but cannot be imported (undefined symbol: f)", "build it again"),
    (old_driver, f"no CUDA device was found: {OLD_DRIVER}", "update the NVIDIA driver"),
    (torch_without_cuda, f"torch {torch.__version__} does not use CUDA", "install one that does"),
    (old_driver_for_torch, "for CUDA 13.2 does not work with this driver", "update the NVIDIA driver"),
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("cause", "because", "remedy"), CAUSES, ids=[cause[0].__name__ for cause in CAUSES])
def test_the_reason_names_the_cause_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cause: Callable[[pytest.MonkeyPatch, Path], None],
    because: str,
    remedy: str,
) -> None:
    cause(monkeypatch, tmp_path)
    choice, devices = choose_accelerator("auto")
    assert (choice.kind, devices, choice.unused_gpu) == ("none", (), True)
    printed, _, do = choice.reason.partition("; ")
    assert printed.startswith("this GPU is not used, because ")
    assert because in printed
    assert remedy in do
    with pytest.raises(ConfigError) as refused:
        choose_accelerator("cuda")
    assert because in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    with_module(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    choice, _ = choose_accelerator("auto")
    assert (choice.unused_gpu, choice.reason) == (False, "no CUDA device was found")


@pytest.mark.usefixtures("gpu")
def test_doctor_fit_and_the_engine_report_bad(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=1))
    left_out(monkeypatch, tmp_path)
    text = "this GPU is not used, because this build has no CUDA module"
    assert main(["doctor", str(model), "--port", "0"]) == 1
    assert f"BAD  accelerator  none: {text}" in capsys.readouterr().out
    assert main(["fit", str(model)]) == 0
    assert f"bad: {text}" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        Engine.load(EngineConfig(model=str(model), cpu_threads=1)).close()
    assert [record.levelname for record in caplog.records if f"bad: {text}" in record.message] == ["WARNING"]


@pytest.mark.usefixtures("gpu")
def test_make_run_reports_bad_and_shows_the_emulated_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")  # for a machine that has a GPU and can use it
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "engine"))
    chosen = run_stack.choose_accelerator(SimpleNamespace(accelerator="", ratio=""))
    assert chosen == run_stack.EMULATED
    printed = capsys.readouterr().out
    assert printed.startswith("bad: this GPU is not used, because ")
    assert "NVIDIA GPU is here" not in printed
