"""Another split of a device's memory between two steps: pages and slots move, tokens stay. On the fake device."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.device.model import DeviceModel
from twofold.engine import Engine

from tests.device.runner_runs import found_device
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

TINY = TinyModel(dtype="bfloat16", hidden_size=64, head_dim=32, num_layers=3, num_experts=10)
ROOM = 2 << 30
TOKENS = 24


def submitted(engine: Engine) -> list[list[Chunk]]:
    """Two requests of different lengths, whose answers grow with each step."""
    found: list[list[Chunk]] = [[], []]
    for n, chunks in enumerate(found):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        prompt = tuple(range(5, 30 + 17 * n))
        engine.submit(GenerationRequest(prompt, sampling, chunks.append, f"r{n}"))
    return found


def tokens(found: list[list[Chunk]]) -> list[list[int]]:
    assert all(chunks[-1].error is None for chunks in found)
    return [[token for chunk in chunks for token in chunk.token_ids] for chunks in found]


def finish(engine: Engine) -> None:
    while engine.step():
        pass


@pytest.mark.slow  # graphs are captured again at every step of it
@pytest.mark.parametrize("family", [TINY, tiny("qwen3_next", dtype="bfloat16")], ids=["pages", "records"])
def test_pages_and_slots_move_and_tokens_stay(
    fake: ModuleType, tmp_path: Path, family: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "model", family)
    config = EngineConfig(
        model=str(path), accelerator="cuda", num_gpu_experts=3, cpu_threads=1, max_total_tokens=512
    )
    with found_device(lambda: fake.open_device(0, total_bytes=ROOM, tick_us=2.0)):
        engine = Engine.load(config)
        undisturbed = submitted(engine)
        finish(engine)
        engine.control.drop_prefixes()
        found = submitted(engine)
        for requested in (
            Resize(num_gpu_experts=6, max_total_tokens=256),
            Resize(num_gpu_experts=1),
            Resize(max_total_tokens=1024),
        ):
            for _ in range(5):
                assert engine.step()
            split = engine.control.resize(requested)
            assert engine.control.memory().num_pages == split.num_pages == engine.stats().num_pages
            assert engine.info.num_slots == engine.control.memory().num_slots
        assert engine.runner.resize_pages  # it is the device's runner that was resized
        refuse_once(monkeypatch)
        with pytest.raises(CapacityError, match="nothing has changed"):
            engine.control.resize(Resize(max_total_tokens=2048, num_gpu_experts=0))
        assert engine.control.memory().num_pages == 64
        with pytest.raises(ConfigError, match="the GPU has room for"):
            engine.control.resize(Resize(max_total_tokens=10**9))
        finish(engine)
        assert tokens(found) == tokens(undisturbed)
        found = submitted(engine)
        for _ in range(7):
            assert engine.step()
        assert engine.control.memory().slots_bytes > 0
        engine.control.sleep()
        assert engine.control.memory().slots_bytes == 0
        assert not engine.step()
        engine.control.wake()
        finish(engine)
        assert [len(answer) for answer in tokens(found)] == [TOKENS, TOKENS]
        engine.close()


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no room for the next state that is asked for."""
    state = DeviceModel.state

    def full(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(DeviceModel, "state", state)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(DeviceModel, "state", full)
