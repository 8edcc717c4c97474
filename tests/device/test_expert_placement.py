"""Placements on the fake device: slots that a captured graph reads take other experts between two steps."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.experts.placement import placement_mask

from tests.device.runner_runs import found_device
from tests.tiny_models.writing import TinyModel, write_tiny_model

TINY = TinyModel(dtype="bfloat16", hidden_size=64, head_dim=32, num_layers=2, num_experts=10)
SLOTS = 6


def resident(engine: Engine) -> list[list[int]]:
    return [list(layer) for layer in engine.control.expert_placement().resident]


def of_mask(strategy: str) -> list[list[int]]:
    return [
        np.flatnonzero(layer).tolist()
        for layer in placement_mask(strategy, TINY.num_layers, TINY.num_experts, SLOTS)
    ]


def submitted(engine: Engine, lengths: tuple[int, ...] = (40, 9)) -> list[list[int]]:
    """Answers that grow with each step."""
    found: list[list[int]] = [[] for _ in lengths]

    def taking(tokens: list[int]) -> object:
        def take(chunk: Chunk) -> None:
            assert chunk.error is None
            tokens.extend(chunk.token_ids)

        return take

    for n, tokens in enumerate(found):
        sampling = SamplingParams(max_tokens=11, ignore_eos=True)
        prompt = tuple(range(5 + n, 5 + n + lengths[n]))
        engine.submit(GenerationRequest(prompt, sampling, taking(tokens), f"r{n}"))  # type: ignore[arg-type]
    return found


def test_swapping_residents_changes_no_token(fake: ModuleType, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path / "model", TINY)),
        accelerator="cuda",
        num_gpu_experts=3,
        cpu_threads=1,
        max_total_tokens=512,
        expert_placement_strategy="uniform",
        enable_dynamic_expert_update=True,
        gpu_prefill_token_threshold=100,
        enable_prefix_caching=False,
        max_itl_ms=60_000.0,
    )
    with found_device(lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
        engine = Engine.load(config)
        assert resident(engine) == of_mask("uniform")
        undisturbed = submitted(engine)
        while engine.step():
            pass
        assert resident(engine) == of_mask("uniform")
        assert engine.runner.moe.counts().evictions == 0
        found = submitted(engine)
        for strategy in ("random", "front-loading", "uniform"):
            for _ in range(3):
                assert engine.step()
            engine.control.place_experts(of_mask(strategy))
            assert resident(engine) == of_mask(strategy)
        while engine.step():
            pass
        assert found == undisturbed
        assert engine.stats().dynamic_update.keys() == {"too_few_tokens"}
        longer = submitted(engine, (130,))
        while engine.step():
            pass
        assert engine.stats().dynamic_update["updated"] == 1
        engine.control.sleep()  # uploads land
        engine.control.wake()
        assert resident(engine) != of_mask("uniform")
        assert list(map(len, resident(engine))) == [3, 3]
        assert engine.stats().dynamic_update["updated"] == 1
        engine.control.place_experts(of_mask("random"))
        again = submitted(engine, (130,))
        while engine.step():
            pass
        assert again == longer
        engine.close()
