"""Adapters served by an engine: an answer depends on its own adapter alone, whatever else the engine does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from twofold.adapters.reading import reserved_bytes
from twofold.api.config import EngineConfig
from twofold.api.errors import CapacityError, ModelLoadError
from twofold.api.parallel_config import ParallelConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.blocks import ops

from tests.engine.adapter_files import write_adapter
from tests.engine.adapter_runs import PROMPT, answers, engine_of, use
from tests.parallel.ranks_in_process import RanksInProcess
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

NAMES = (None, "a", "b")
_LONG = ("qwen3_moe", "gpt_oss", "qwen3_next")
FAMILIES = ("deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in _LONG))
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "emulated": {"accelerator": "emulated:rtx4090-pcie4", "num_gpu_experts": 5},
    "chunks": {"max_num_batched_tokens": 8},
    "speculation": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
    "few pages": {"max_total_tokens": 160},
    "ranks": {},
}


def write_two(root: Path, family: str) -> tuple[Path, tuple[str, ...]]:
    """A model, and --lora-modules of two adapters."""
    directory = write_tiny_model(root / "model", EXAMPLES[family])
    engine = engine_of(directory)
    model = engine._parts.adapters
    assert model is not None
    matrices = {name: shape for name, shape in model.shapes.matrices.items() if name in model._matrices}
    shapes = dataclasses.replace(model.shapes, matrices=matrices)
    paths = [write_adapter(root / name, shapes, seed) for seed, name in enumerate("ab")]
    engine.close()
    return directory, tuple(f"{path.name}={path}" for path in paths)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_depends_on_its_own_adapter_alone(family: str, tmp_path: Path) -> None:
    directory, modules = write_two(tmp_path, family)
    alone = {}
    for name in NAMES:
        engine = engine_of(directory, lora_modules=modules, enable_prefix_caching=False)
        (alone[name],) = answers(engine, [name])
        engine.close()
    assert len({tuple(tokens) for tokens in alone.values()}) == len(NAMES)
    asked = ["a", None, "b", "a", "b", None]
    for way, settings in WAYS.items():
        share = None
        if way == "ranks":
            config = EngineConfig(model=str(directory), accelerator="none", cpu_threads=1, seed=1)
            parallel = ParallelConfig(2, tensor_parallel_min_bytes=0, enable_expert_parallel=True)
            share = RanksInProcess(config, parallel).share
        engine = engine_of(directory, share, lora_modules=modules, **settings)
        for _ in range(2):  # the second time from the prefix cache
            found = answers(engine, asked)
            assert found == [alone[name] for name in asked], way
        engine.close()


def test_an_emulated_step_costs_what_its_adapters_are_read_for(tmp_path: Path) -> None:
    directory, _ = write_two(tmp_path, "qwen3_moe")
    engine = engine_of(directory)
    assert engine._parts.adapters is not None
    shapes = dataclasses.replace(engine._parts.adapters.shapes, matrices={})
    engine.close()
    path = write_adapter(tmp_path / "c", shapes, 3, size=1e-20)  # changes no token

    def run(name: str | None, modules: tuple[str, ...]) -> tuple[list[list[int]], float]:
        engine = engine_of(
            directory, accelerator="emulated:rtx4090-pcie4", num_gpu_experts=5, lora_modules=modules
        )
        found = answers(engine, [name])
        us = engine._parts.loaded.runner.moe.virtual_now_us
        engine.close()
        assert us is not None
        return found, us

    base = run(None, ())
    assert run(None, (f"c={path}",)) == base
    adapted = run("c", (f"c={path}",))
    assert adapted[0] == base[0]
    assert adapted[1] > base[1]


def test_products_with_the_same_a_keep_it_once() -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(size).astype(np.float32) for size in ((4, 64), (96, 4)))
    first = ops.LowRank(a, b)
    assert ops.LowRank(a, b + 1, like=first).bytes == first.bytes - a.nbytes
    assert ops.LowRank(a + 1, b, like=first).bytes == first.bytes


def test_memory_of_adapters_is_left_free_by_the_cache(tmp_path: Path) -> None:
    for name, size in (("a", 1000), ("b", 3000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"x" * size)
    (tmp_path / "c.gguf").write_bytes(b"x" * 2000)
    paths = {"a": "a", "b": "b", "c": "c.gguf"}
    modules = tuple(f"{name}={tmp_path / path}" for name, path in paths.items())
    assert reserved_bytes(EngineConfig(lora_modules=modules)) == 6000
    assert reserved_bytes(EngineConfig(lora_modules=modules, max_cpu_loras=2)) == 5000
    assert reserved_bytes(EngineConfig(lora_modules=modules[2:]), as_f32=True) == 4000
    save_file({"a": np.ones((3, 8), np.float16)}, tmp_path / "a/adapter_model.safetensors")
    assert reserved_bytes(EngineConfig(lora_modules=modules[:1]), as_f32=True) == 4 * 3 * 8


def test_the_least_recently_used_adapter_leaves_and_returns(tmp_path: Path) -> None:
    directory, modules = write_two(tmp_path, "qwen3_moe")
    engine = engine_of(directory, lora_modules=modules, max_cpu_loras=1)
    loaded = {each.name: each.loaded is not None for each in engine.adapters.known()}
    assert loaded == {"a": False, "b": True}
    first = answers(engine, ["a"])
    assert answers(engine, ["b"]) != first
    assert answers(engine, ["a"]) == first
    adapter = use(engine, "a")
    request = GenerationRequest(PROMPT, SamplingParams(max_tokens=4), request_id="busy", adapter=adapter)
    engine.submit(request)
    with pytest.raises(CapacityError, match="requests use all adapters"):
        use(engine, "b")
    while engine.step():
        pass
    assert use(engine, "b") is not None
    with pytest.raises(CapacityError, match="has just left memory"):
        engine.submit(request)
    engine.close()


def test_an_unloaded_adapter_finishes_its_requests_and_a_new_one_of_its_name_is_another(
    tmp_path: Path,
) -> None:
    directory, modules = write_two(tmp_path, "qwen3_moe")
    engine = engine_of(directory, lora_modules=modules)
    alone = answers(engine, ["a", "b"])
    tokens: list[int] = []
    engine.submit(
        GenerationRequest(
            PROMPT,
            SamplingParams(max_tokens=16, ignore_eos=True),
            lambda chunk: tokens.extend(chunk.token_ids),
            adapter=use(engine, "a"),
        )
    )
    engine.step()
    engine.adapters.load("a", tmp_path / "b")
    engine.adapters.unload("b")
    while engine.step():
        pass
    assert tokens == alone[0]
    assert answers(engine, ["a"]) == [alone[1]]
    assert use(engine, "b") is None
    with pytest.raises(ModelLoadError):
        engine.adapters.load("a", tmp_path / "model")
    assert answers(engine, ["a"]) == [alone[1]]
    engine.close()
