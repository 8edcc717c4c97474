"""`--accelerator cuda` with LoRA adapters on the fake device: loaded at start and later, mixed in batches, refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import CapacityError, ConfigError, ModelLoadError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.device.adapters.loaded import DeviceAdapters
from twofold.engine import Engine

from tests.device.adapters.adapted_runs import RANKS, adapted_runner, write_adapters
from tests.device.runner_runs import found_device, two_devices
from tests.tiny_models.kernel_sizes import QWEN
from tests.tiny_models.writing import write_tiny_model

F32 = npt.NDArray[np.float32]
PROMPT = tuple(range(5, 30))
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def files(fake: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model, and the adapters `a` and `b` of it."""
    root = tmp_path_factory.mktemp("adapted")
    path = write_tiny_model(root / "model", QWEN)
    return path, write_adapters(root, adapted_runner(fake, path, slots=0))


@pytest.fixture
def load(simt: ModuleType, files: tuple[Path, list[Path]]) -> Iterator[Any]:
    engines: list[Engine] = []

    def load(**settings: Any) -> Engine:
        defaults = {
            "accelerator": "cuda",
            "gpu_experts_ratio": 0.25,
            "cpu_threads": 1,
            "max_total_tokens": 512,
        }
        with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
            engines.append(Engine.load(EngineConfig(model=str(files[0]), **defaults | settings)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def modules(paths: list[Path]) -> tuple[str, ...]:
    return tuple(f"{name}={path}" for name, path in zip(NAMES, paths, strict=True))


def scores(engine: Engine, names: list[str | None]) -> list[F32]:
    """Log probabilities of PROMPT's tokens by these adapters, all asked for at once; more tokens are decoded."""
    found: list[list[float]] = [[] for _ in names]
    held = [None if name is None else engine.adapters.hold(((name, 1.0),)) for name in names]

    def take(values: list[float], chunk: Chunk) -> None:
        values += [each.logprob for each in chunk.prompt_logprobs or () if each is not None]

    for index, (adapter, values) in enumerate(zip(held, found, strict=True)):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0)
        on_chunk = functools.partial(take, values)
        engine.submit(GenerationRequest(PROMPT, sampling, on_chunk, str(index), adapter=adapter))
    while engine.step():
        pass
    for adapter in held:
        if adapter is not None:
            engine.adapters.release(adapter)
    return [np.array(values, np.float32) for values in found]


def distance(ours: F32, theirs: F32) -> float:
    assert len(ours) == len(theirs) == len(PROMPT) - 1
    return float(np.median(np.abs(ours - theirs)))


def test_scores_in_a_batch_are_those_of_each_adapter_alone(load: Any, files: tuple[Path, list[Path]]) -> None:
    engine = load(lora_modules=modules(files[1]))
    asked: list[str | None] = ["a", None, "b", "a", None]
    alone = {name: scores(engine, [name])[0] for name in (*NAMES, None)}
    on_cpu = load(accelerator="none", lora_modules=modules(files[1]))
    for found in (scores(engine, asked), scores(on_cpu, asked)):
        assert max(distance(ours, alone[name]) for ours, name in zip(found, asked, strict=True)) < 0.1
    assert min(distance(alone[name], alone[None]) for name in NAMES) > 0.5
    assert distance(alone["a"], alone["b"]) > 0.5
    assert engine.stats().placement.hits > 0


def test_several_devices_compute_adapters_of_the_layers_and_experts_they_have(
    simt: ModuleType, load: Any, files: tuple[Path, list[Path]]
) -> None:
    settings = {"lora_modules": modules(files[1]), "gpu_experts_ratio": 0.5}
    asked: list[str | None] = ["a", None, "b"]
    one = scores(load(**settings), asked)
    with two_devices(simt, 2 << 30, 2 << 30):
        engine = Engine.load(
            EngineConfig(
                model=str(files[0]), devices="cuda:0,cuda:1", cpu_threads=1, max_total_tokens=512, **settings
            )
        )
    for ours, theirs in zip(scores(engine, asked), one, strict=True):
        assert distance(ours, theirs) < 0.1
    model = engine._parts.adapters
    assert isinstance(model, DeviceAdapters)
    assert [len(place.memory) for place in model._devices] == [2, 2]
    engine.adapters.unload("a")
    engine.adapters.unload("b")
    assert [len(place.memory) for place in model._devices] == [0, 0]
    engine.close()


def test_adapters_come_and_go_while_the_engine_serves(load: Any, files: tuple[Path, list[Path]]) -> None:
    engine = load(lora_dir="/", max_lora_rank=8, max_cpu_loras=1)
    assert "LoRA adapters" in engine.info.accelerator_reason
    engine.adapters.load("a", files[1][0])
    (first,) = scores(engine, ["a"])
    engine.adapters.load("b", files[1][1])  # `a` leaves memory
    (second,) = scores(engine, ["b"])
    (again,) = scores(engine, ["a"])
    assert distance(first, again) < 0.1 < 0.5 < distance(first, second)
    engine.adapters.unload("a")
    with pytest.raises(KeyError):
        engine.adapters.hold((("a", 1.0),))


def test_what_does_not_fit_is_refused_in_one_line(
    load: Any, files: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(lora_dir="/", max_lora_rank=RANKS[0])
    with pytest.raises(ModelLoadError, match="rank 5"):
        engine.adapters.load("b", files[1][1])
    model = engine._parts.adapters
    assert isinstance(model, DeviceAdapters)
    monkeypatch.setattr(model, "_limit", 1000)
    with pytest.raises(
        CapacityError, match=r"adapter a takes .* of the .* reserved .*: raise --max-loras \(now 8\)$"
    ):
        engine.adapters.load("a", files[1][0])
    assert engine.adapters.known() == []
    with pytest.raises(ConfigError, match="--lora-dir"):
        load().adapters.load("a", files[1][0])
