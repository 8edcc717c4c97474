"""A device that fails its self-check, while loading or while serving: requests end by name, and the CPU goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import ConfigError, DeviceLostError, KernelError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.device.checks import loss
from twofold.device.model import DeviceModel
from twofold.device.queue import still_busy, wait_until
from twofold.engine import Engine
from twofold.server.app import create_app
from twofold.tools.cli.main import main

from tests.device.fake_device import FakeDevice
from tests.device.runner_runs import found_device
from tests.tiny_models.writing import TinyModel, write_tiny_model

TINY = TinyModel(dtype="bfloat16", hidden_size=64, head_dim=32, num_layers=3, num_experts=10)
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture
def cuda(fake: ModuleType) -> Iterator[None]:
    with found_device(lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
        yield


def config(tiny: Path, accelerator: str = "auto", **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(tiny),
        accelerator=accelerator,
        gpu_experts_ratio=0.5,
        cpu_threads=1,
        max_total_tokens=512,
        **options,
    )


def fails_at(
    monkeypatch: pytest.MonkeyPatch, call: int, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Plant a fault into the logits of every step from the given one on."""
    calls: list[int] = []
    logits = DeviceModel.logits

    def faulty(self: DeviceModel, rows: torch.Tensor, adapted: None) -> torch.Tensor:
        calls.append(len(rows))
        found = logits(self, rows, adapted)
        return fault(found) if len(calls) >= call else found

    monkeypatch.setattr(DeviceModel, "logits", faulty)


def nan(logits: torch.Tensor) -> torch.Tensor:
    logits[:, 7] = float("nan")
    return logits


def infinity(logits: torch.Tensor) -> torch.Tensor:
    logits[0, 3] = float("-inf")
    return logits


def cuda_error(logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")


def timeout(logits: torch.Tensor) -> torch.Tensor:
    raise still_busy(35.0)


@pytest.fixture
def dead_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later call of a device fails, too."""

    def fail(device: object) -> dict[str, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(loss, "copy_both_ways", fail)


FAULTS = {
    "nan": (nan, "NaN or an infinity"),
    "infinity": (infinity, "NaN or an infinity"),
    "cuda-error": (cuda_error, "illegal memory access"),
    "timeout": (timeout, "not come to rest"),
}


@pytest.mark.usefixtures("cuda", "dead_context")
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_end_by_name_and_the_next_one_is_answered_by_the_cpu(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plain = Engine.load(config(tiny, "none"))
    expected = tokens_of(plain)
    plain.close()
    plant, reason = FAULTS[fault]
    engine = Engine.load(config(tiny))
    store = engine.runner.moe.store
    fails_at(monkeypatch, 3, plant)
    engine.start()
    with TestClient(create_app(engine, ServerConfig()), base_url="http://127.0.0.1") as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert "DeviceLostError" in answer.json()["error"]["message"]
        assert reason in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "engine_error"
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        health = client.get("/health")
    assert health.status_code == 200
    assert health.json()["accelerator"] == "none"
    assert health.json()["failure"]["state"] == "replaced"
    assert reason in health.json()["failure"]["reason"]
    assert reason in health.json()["accelerator_reason"]
    assert engine.runner.moe.store is store  # the experts are not packed again
    assert tokens_of(engine) == expected
    engine.close()


@pytest.mark.usefixtures("cuda", "dead_context")
def test_a_stream_ends_with_an_error_event(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(config(tiny))
    fails_at(monkeypatch, 4, nan)
    engine.start()
    with TestClient(create_app(engine, ServerConfig()), base_url="http://127.0.0.1") as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "stream": True, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
    assert '"error"' in answer.text
    assert "DeviceLostError" in answer.text
    assert '"finish_reason":"length"' not in answer.text.replace(" ", "")
    engine.close()


@pytest.mark.usefixtures("cuda", "dead_context")
def test_a_server_with_cuda_requested_fails_with_a_remedy(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(config(tiny, "cuda"))
    fails_at(monkeypatch, 3, cuda_error)
    engine.start()
    with TestClient(create_app(engine, ServerConfig()), base_url="http://127.0.0.1") as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 500
        health, ready, again = (
            client.get("/health"),
            client.get("/ready"),
            client.post("/v1/completions", json=body),
        )
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "restart the process" in health.json()["failure"]["reason"]
    assert (ready.status_code, ready.json()["status"]) == (503, "failed")
    assert (again.status_code, again.json()["error"]["code"]) == (503, "device_lost")
    engine.close()


@pytest.mark.usefixtures("cuda", "dead_context")
def test_waiting_requests_are_answered_by_the_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(config(tiny, max_num_seqs=1))
    fails_at(monkeypatch, 3, nan)
    chunks: list[list[Chunk]] = [[], [], []]
    for number, received in enumerate(chunks):
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(tuple(PROMPT), sampling, received.append, f"r{number}"))
    while engine.step():
        pass
    assert [each[-1].finish_reason for each in chunks] == ["error", "length", "length"]
    expected = tokens_of(engine, 6)
    assert [[token for chunk in each for token in chunk.token_ids] for each in chunks[1:]] == [expected] * 2
    engine.close()


@pytest.mark.usefixtures("cuda", "dead_context")
def test_health_reports_that_the_model_is_being_loaded_on_the_cpu(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(config(tiny))
    fails_at(monkeypatch, 3, nan)
    loading, resume = threading.Event(), threading.Event()
    reload_on_cpu = engine._parts.reload_on_cpu
    assert reload_on_cpu is not None

    def slowly(reason: str) -> Any:
        loading.set()
        assert resume.wait(60)
        return reload_on_cpu(reason)

    object.__setattr__(engine._parts, "reload_on_cpu", slowly)
    engine.start()
    with TestClient(create_app(engine, ServerConfig()), base_url="http://127.0.0.1") as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 500
        assert loading.wait(60)
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.json()["failure"]["state"] == "reloading"
        resume.set()
        assert client.post("/v1/completions", json=body).status_code == 200
    engine.close()


@pytest.mark.usefixtures("cuda")
def test_a_device_that_still_copies_survives_one_failed_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(config(tiny))
    calls: list[int] = []
    forward = DeviceModel.forward

    def fails_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a launch failed")
        return forward(*given)

    monkeypatch.setattr(DeviceModel, "forward", fails_once)
    with pytest.raises(KernelError, match="RuntimeError: a launch failed"):
        engine.generate(PROMPT, SamplingParams(max_tokens=4))
    assert len(tokens_of(engine)) == 8
    assert (engine.info.accelerator, engine.failure) == ("cuda", None)
    engine.close()


@pytest.mark.usefixtures("cuda")
def test_a_device_whose_steps_fail_twice_in_a_row_is_lost(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(config(tiny))
    fails_at(monkeypatch, 1, cuda_error)
    errors = []
    for _ in range(2):
        with pytest.raises(KernelError) as caught:
            engine.generate(PROMPT, SamplingParams(max_tokens=4))
        errors.append(str(caught.value))
    assert "DeviceLostError" not in errors[0]
    assert "2 steps in a row failed" in errors[1]
    assert len(tokens_of(engine)) == 8
    assert engine.info.accelerator == "none"
    engine.close()


def test_a_wait_for_endless_work_has_a_limit() -> None:
    with pytest.raises(DeviceLostError, match=r"within 0\.01 s"):
        wait_until(lambda: False, 0.01)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("accelerator", ["auto", "cuda"])
def test_a_device_that_fails_while_loading(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    monkeypatch.setattr("twofold.device.loading.DeviceModel", fail)
    if accelerator == "cuda":
        with pytest.raises(KernelError, match="device-side assert"):
            Engine.load(config(tiny, "cuda"))
        return
    engine = Engine.load(config(tiny))
    assert engine.info.accelerator == "none"
    assert "device-side assert triggered" in engine.info.accelerator_reason
    assert len(tokens_of(engine)) == 8
    engine.close()


class WrongCopies(FakeDevice):
    """Staging buffers whose copies change a byte."""

    def staging_buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = super().staging_buffer(size, dtype)
        return WrongTensor(made) if dtype == torch.uint8 else made


class WrongTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(cls, data)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        super().copy_(source, non_blocking)
        self.view(-1)[5] ^= 1
        return self


def test_auto_falls_back_to_the_cpu_when_the_self_check_fails(
    fake: ModuleType, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def native() -> Any:
        return fake.open_device(0, total_bytes=2 << 30, tick_us=2.0)

    with found_device(native, WrongCopies, self_check=True), caplog.at_level(logging.WARNING):
        engine = Engine.load(config(tiny))
    assert engine.info.accelerator == "none"
    for text in (engine.info.accelerator_reason, caplog.text):
        assert "“copy to the device and back”: a copy to the device and back changed 1 of" in text
        assert "twofold doctor --gpu" in text
    assert len(tokens_of(engine)) == 8
    engine.close()


def test_cuda_ends_in_one_line_when_the_self_check_fails(
    fake: ModuleType, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with found_device(
        lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0), WrongCopies, self_check=True
    ):
        assert main(["generate", str(tiny), "--prompt", "one", "--accelerator", "cuda"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--accelerator cuda: cuda:0 failed the self-check" in error
        with pytest.raises(ConfigError, match="--devices cuda:0: cuda:0 failed the self-check"):
            Engine.load(config(tiny, devices="cuda:0"))
        assert Engine.load(config(tiny, "cuda", gpu_self_check=False)).info.accelerator == "cuda"


def test_a_device_that_passes_is_used(fake: ModuleType, tiny: Path) -> None:
    with found_device(lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0), self_check=True):
        engine = Engine.load(config(tiny))
    assert engine.info.accelerator == "cuda"
    assert len(tokens_of(engine)) == 8
    engine.close()


def tokens_of(engine: Engine, num_tokens: int = 8) -> list[int]:
    found: list[int] = []
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.generate(PROMPT, sampling, lambda chunk: found.extend(chunk.token_ids))
    return found
